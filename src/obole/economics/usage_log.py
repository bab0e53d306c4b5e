"""What tenants had, from the lines of a server's log or from its metrics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from obole.economics.invoice import Usage
from obole.errors import InvalidRequest
from obole.prices import EXACT, KINDS, PriceList

HOW = "start the server with --log-format json, and give what it writes on standard error"

Key = tuple[str, str, str]  # tenant, day, kind


@dataclass(slots=True)
class Tally:
    """Sums over the lines read so far. `requests`: lines with tokens to be paid for; `skipped`: lines of no log."""

    prices: PriceList | None
    skip: bool = False
    tokens: Counter[Key] = field(default_factory=Counter)
    costs: dict[Key, Decimal] = field(default_factory=dict)
    unpriced: set[Key] = field(default_factory=set)
    currency: str | None = None
    requests: int = 0
    skipped: int = 0
    lines: int = 0

    def __post_init__(self) -> None:
        if self.prices is not None:
            self.currency = self.prices.currency

    def read(self, name: str, lines: Iterable[bytes]) -> None:
        """Take in the lines of a file. Raises `InvalidRequest` for one that is of no server's log, unless those are skipped."""
        for number, line in enumerate(lines, 1):
            self.lines += 1
            if not line.strip():
                continue
            try:
                self._line(line)
            except InvalidRequest:
                raise
            except (ValueError, KeyError, TypeError, InvalidOperation, RecursionError):
                if not self.skip:
                    raise InvalidRequest(
                        "files",
                        f"Line {number} of {name} is not from the log of a server: {HOW}, or skip such lines by --skip-bad.",
                    ) from None
                self.skipped += 1

    def usages(self) -> list[Usage]:
        """One for each tenant, day and kind; those of which a line has no price have none."""
        return [
            Usage(*key, count, None if key in self.unpriced else self.costs.get(key, Decimal(0)))
            for key, count in self.tokens.items()
        ]

    def _line(self, line: bytes) -> None:
        entry = json.loads(line)
        day, _, rest = entry["time"].partition("T")
        if len(day) != 10 or not rest or "level" not in entry:
            raise ValueError("no log line")
        usage: Mapping[str, int] | None = entry.get("usage")
        if usage is None:
            return  # about the server itself, or a request that came to nothing
        amounts = self._amounts(usage, entry)
        self.requests += 1
        for kind, count in usage.items():
            key = (str(entry["tenant"]), day, kind)
            self.tokens[key] += count
            if amounts is None:
                self.unpriced.add(key)
            else:
                self.costs[key] = EXACT.add(self.costs.get(key, Decimal(0)), amounts[kind])

    def _amounts(self, usage: Mapping[str, int], entry: Mapping[str, Any]) -> dict[str, Decimal] | None:
        """What the tokens of a line cost: by the given prices, else as it says. Raises ValueError for what no line has."""
        if any(kind not in KINDS or isinstance(n, bool) or not isinstance(n, int) or n < 0 for kind, n in usage.items()):
            raise ValueError("no tokens")
        if self.prices is not None:
            return {kind: self.prices.amount(kind, count) for kind, count in usage.items()}
        if "cost" not in entry:
            return None
        currency = entry["currency"]
        if self.currency not in (None, currency):
            raise InvalidRequest(
                "prices", f"The log has prices in {self.currency} and in {currency}: give one list for all by --prices."
            )
        self.currency = str(currency)
        return {kind: Decimal(entry["cost"][kind]) for kind in usage}


def from_metrics(samples: Iterable[tuple[Mapping[str, str], float]], prices: PriceList | None) -> list[Usage]:
    """Usages from samples of `obole_tenant_usage_tokens_total`, since the server was started: no days, tenants by number."""
    found = []
    for labels, value in samples:
        kind, count = labels["kind"], round(value)
        found.append(Usage(labels["tenant"], "", kind, count, None if prices is None else prices.amount(kind, count)))
    return found
