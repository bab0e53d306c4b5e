"""What tokens cost: a list of prices, and what a receipt comes to. Exact decimals throughout, nothing is rounded here."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

from obole.errors import ConfigError
from obole.types import Receipt, Source, Tier

INPUT, OUTPUT, COPIED, REJECTED = "input", "output", "copied", "rejected"
CACHED = {tier: f"cached_{tier}" for tier in Tier}
KINDS = (INPUT, *CACHED.values(), OUTPUT, COPIED, REJECTED)
COPYING = (Source.LOOKUP, Source.MEMORY, Source.PREDICTION)  # drafts that are copied from text that is there already

EXACT = Context(prec=120)  # digits; the default of 28 would round large sums
LARGEST = Decimal(10**9)
PLACES = 12  # decimals that a price may have, so that every amount is exact
LARGEST_FILE = 1 << 20
EXAMPLE = 'currency = "USD" and [per_million] input = 0.30, cached = 0.03, output = 1.20, copied = 0.40'


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of a million tokens by kind, one for each of `KINDS`. `currency`: a code of three capital letters."""

    currency: str
    per_million: Mapping[str, Decimal]

    def amount(self, kind: str, tokens: int) -> Decimal:
        """What so many tokens cost, exactly."""
        return EXACT.scaleb(EXACT.multiply(self.per_million[kind], tokens), -6)


@dataclass(frozen=True, slots=True)
class Charge:
    """What one answer costs: (kind, tokens, amount) of every kind that it has, which add up to `total`."""

    currency: str
    lines: tuple[tuple[str, int, Decimal], ...]

    @property
    def total(self) -> Decimal:
        return exact_sum(amount for _, _, amount in self.lines)

    def to_json(self) -> dict[str, Any]:
        """Amounts as text, so that no digit is lost."""
        parts = {kind: plain(amount) for kind, _, amount in self.lines}
        return {"currency": self.currency, "total": plain(self.total), "parts": parts}


def tokens_by_kind(receipt: Receipt, *, prompt: bool = True) -> dict[str, int]:
    """The tokens of a receipt as a price list names them; kinds without any are left out.

    `prompt`: the prompt counts, as it does once for all answers to it. What a cancelled request did not come to read is no
    kind of token. Tokens that a grammar or a draft model proposed are plain output: only text that was there already is copied.
    """
    counts: Counter[str] = Counter()
    if prompt:
        counts[INPUT] = receipt.computed_tokens
        counts.update(cached_by_kind(receipt))
    copied = sum(receipt.sources.get(source, 0) for source in COPYING)
    counts[OUTPUT] = receipt.output_tokens - copied
    counts[COPIED] = copied
    counts[REJECTED] = receipt.rejected.get(Source.PREDICTION, 0)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def cached_by_kind(receipt: Receipt) -> dict[str, int]:
    """Cached tokens of the prompt by kind. A receipt that does not tell them apart found them all in the device's pool."""
    by_tier = receipt.cached_by_tier or {Tier.DEVICE: receipt.cached_tokens}
    return {CACHED[Tier(tier)]: count for tier, count in by_tier.items()}


def price(receipt: Receipt, prices: PriceList, *, prompt: bool = True) -> Charge:
    """What an answer costs. `prompt`: see `tokens_by_kind`."""
    counts = tokens_by_kind(receipt, prompt=prompt)
    return Charge(prices.currency, tuple((kind, count, prices.amount(kind, count)) for kind, count in counts.items()))


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Tokens by kind of several receipts together, in the order of `KINDS`."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return {kind: total[kind] for kind in KINDS if total[kind]}


def exact_sum(amounts: Iterable[Decimal]) -> Decimal:
    total = Decimal(0)
    for amount in amounts:
        total = EXACT.add(total, amount)
    return total


def plain(amount: Decimal) -> str:
    """An amount without exponent or trailing zeros."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") or "0" if "." in text else text


def read_price_list(path: Path) -> PriceList:
    """The price list in a TOML file, or a JSON file of the same structure. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ConfigError(f"{path} is too large for a price list: name a small TOML or JSON file.")
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"The price list {path} cannot be read ({error.strerror or error}).") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The price list {path} is not UTF-8 text: write it as {EXAMPLE}.") from None
    try:
        as_json = path.suffix == ".json"
        document = json.loads(text, parse_float=Decimal) if as_json else tomllib.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The price list {path} is no {'JSON' if path.suffix == '.json' else 'TOML'} ({error}).") from None
    try:
        return price_list(document)
    except ConfigError as error:
        raise ConfigError(f"The price list {path}: {error}") from None


def price_list(document: object) -> PriceList:
    """A price list from what a file holds. Raises `ConfigError`."""
    if not isinstance(document, dict) or not isinstance(document.get("per_million"), dict):
        raise ConfigError(f"there is no table per_million; write {EXAMPLE}.")
    unknown = [*(set(document) - {"currency", "per_million"}), *(set(document["per_million"]) - {"cached", *KINDS})]
    if unknown:
        raise ConfigError(f"{min(unknown)!r} is not known; there are currency and, per_million, cached, {', '.join(KINDS)}.")
    currency = document.get("currency")
    if not isinstance(currency, str) or not re.fullmatch(r"[A-Z]{3}", currency):
        raise ConfigError(f"currency must be a code of three capital letters such as USD, not {currency!r}.")
    given: dict[str, Any] = dict(document["per_million"])
    cached = given.pop("cached", None)
    if cached is not None:
        by_tier = cached if isinstance(cached, dict) else dict.fromkeys(map(str, Tier), cached)
        for tier, value in by_tier.items():
            if tier not in set(Tier):
                raise ConfigError(f"cached has {tier!r}, which is no tier; there are {', '.join(Tier)}.")
            if CACHED[Tier(tier)] in given:
                raise ConfigError(f"cached and {CACHED[Tier(tier)]} both give a price: keep one of them.")
            given[CACHED[Tier(tier)]] = value
    given.setdefault(REJECTED, 0)
    for kind in KINDS:
        if kind not in given:
            raise ConfigError(f"there is no price for {kind}; write {EXAMPLE}.")
    return PriceList(currency, {kind: _amount(kind, given[kind]) for kind in KINDS})


def _amount(kind: str, value: object) -> Decimal:
    fit = isinstance(value, int | Decimal) and not isinstance(value, bool)
    found = Decimal(value) if fit else Decimal("NaN")  # type: ignore[arg-type]
    exponent = found.normalize().as_tuple().exponent if found.is_finite() else 0
    if not found.is_finite() or not 0 <= found <= LARGEST or (isinstance(exponent, int) and -exponent > PLACES):
        raise ConfigError(f"{kind} must be a number from 0 to {LARGEST} with at most {PLACES} decimals, not {value}.")
    return found
