"""Prices: what files may say, and that what a receipt comes to adds up exactly."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.errors import ConfigError
from obole.prices import KINDS, PriceList, added, exact_sum, plain, price, price_list, read_price_list, tokens_by_kind
from obole.types import Receipt

TOML = """
currency = "EUR"
[per_million]
input = 0.30
cached = {device = 0.03, ram = 0.05, ssd = 0.08}
output = 1.20
copied = 0.4
"""
NOTHING = dict(
    prompt_tokens=0, cached_tokens=0, computed_tokens=0, unread_tokens=0, output_tokens=0, sources={}, forward_passes=0,
    weight_bytes=0, kv_bytes=0, preemptions=0, recomputed_tokens=0, queued_seconds=0.0, prefill_seconds=0.0,
    decode_seconds=0.0, total_seconds=0.0, seed=0,
)  # fmt: skip
SOURCES = ("model", "lookup", "memory", "prediction", "forced", "draft")

amounts = st.decimals(0, 10**6, places=6)
lists = st.builds(PriceList, st.just("USD"), st.fixed_dictionaries(dict.fromkeys(KINDS, amounts)))


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    count = st.integers(0, 10**7)
    cached, computed, unread = draw(count), draw(count), draw(count)
    sources = {name: draw(count) for name in SOURCES}
    return Receipt(**{
        **NOTHING,
        "prompt_tokens": cached + computed + unread,
        "cached_tokens": cached,
        "computed_tokens": computed,
        "unread_tokens": unread,
        "output_tokens": sum(sources.values()),
        "sources": sources,
        "rejected": {"prediction": draw(count), "lookup": draw(count)},
    })  # fmt: skip


@given(receipts(), lists)
def test_parts_add_up_and_every_token_is_of_one_kind(receipt, prices):
    charge = price(receipt, prices)
    assert charge.total == exact_sum(amount for _, _, amount in charge.lines)
    counts = {kind: count for kind, count, _ in charge.lines}
    read = receipt.cached_tokens + receipt.computed_tokens
    assert sum(counts.get(kind, 0) for kind in KINDS[:4]) == read
    assert counts.get("output", 0) + counts.get("copied", 0) == receipt.output_tokens
    for kind, count, amount in charge.lines:
        assert amount * 10**6 == prices.per_million[kind] * count
    shown = charge.to_json()
    assert Decimal(shown["total"]) == exact_sum(map(Decimal, shown["parts"].values())) == charge.total


@given(st.lists(receipts(), max_size=4), lists)
def test_one_charge_for_all_tokens_is_that_of_its_receipts(several, prices):
    together = added(tokens_by_kind(receipt) for receipt in several)
    assert exact_sum(prices.amount(kind, n) for kind, n in together.items()) == exact_sum(
        price(receipt, prices).total for receipt in several
    )


def test_a_prompt_is_charged_once_for_all_its_answers():
    receipt = Receipt(**{**NOTHING, "computed_tokens": 10, "output_tokens": 3, "sources": {"model": 2, "memory": 1}})
    assert tokens_by_kind(receipt) == {"input": 10, "output": 2, "copied": 1}
    assert tokens_by_kind(receipt, prompt=False) == {"output": 2, "copied": 1}


@dataclasses.dataclass(frozen=True)
class TieredReceipt:
    """A receipt that tells tiers apart."""

    computed_tokens: int = 1
    cached_tokens: int = 12
    output_tokens: int = 0
    sources: dict = dataclasses.field(default_factory=dict)
    rejected: dict = dataclasses.field(default_factory=dict)
    cached_by_tier: dict = dataclasses.field(default_factory=lambda: {"device": 5, "ram": 3, "ssd": 4})


def test_tiers_have_prices_of_their_own(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(TOML)
    charge = price(TieredReceipt(), read_price_list(path))
    parts = {kind: str(amount.normalize()) for kind, _, amount in charge.lines}
    assert parts == {"input": "3E-7", "cached_device": "1.5E-7", "cached_ram": "1.5E-7", "cached_ssd": "3.2E-7"}
    assert charge.to_json()["total"] == "0.00000092"


def test_files(tmp_path):
    toml, as_json = tmp_path / "prices.toml", tmp_path / "prices.json"
    toml.write_text(TOML)
    as_json.write_text(
        '{"currency": "EUR", "per_million": {"input": 0.3, "cached": {"device": 0.03, "ram": 0.05, "ssd": 0.08}, '
        '"output": 1.2, "copied": 0.4, "rejected": 0}}'
    )
    assert read_price_list(toml) == read_price_list(as_json)
    assert read_price_list(toml).per_million["cached_ram"] == Decimal("0.05")
    assert read_price_list(toml).per_million["rejected"] == 0


GOOD = {"input": 1, "cached": Decimal("0.1"), "output": 2, "copied": 1}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "per_million"),
        ({"currency": "USD"}, "per_million"),
        ({"currency": "usd", "per_million": GOOD}, "three capital letters"),
        ({"per_million": GOOD}, "currency"),
        ({"currency": "USD", "per_million": {**GOOD, "imput": 1}}, "'imput'"),
        ({"currency": "USD", "extra": 1, "per_million": GOOD}, "'extra'"),
        ({"currency": "USD", "per_million": {"input": 1}}, "cached_device"),
        ({"currency": "USD", "per_million": {**GOOD, "output": -1}}, "output must be"),
        ({"currency": "USD", "per_million": {**GOOD, "output": True}}, "output must be"),
        ({"currency": "USD", "per_million": {**GOOD, "output": "1"}}, "output must be"),
        ({"currency": "USD", "per_million": {**GOOD, "output": Decimal("NaN")}}, "output must be"),
        ({"currency": "USD", "per_million": {**GOOD, "output": Decimal("1e-13")}}, "at most 12 decimals"),
        ({"currency": "USD", "per_million": {**GOOD, "output": 10**10}}, "output must be"),
        ({"currency": "USD", "per_million": {**GOOD, "cached": {"tape": 1}}}, "'tape'"),
        ({"currency": "USD", "per_million": {**GOOD, "cached_ram": 1}}, "cached_ram both"),
        ({"currency": "USD", "per_million": {**GOOD, "cached": {"device": 1}}}, "no price for cached_ram"),
    ],
)
def test_lists_that_are_none(document, message):
    with pytest.raises(ConfigError, match=message):
        price_list(document)


def test_files_that_are_no_lists(tmp_path):
    path = tmp_path / "prices.toml"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_price_list(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_price_list(path)
    path.write_text("currency = ")
    with pytest.raises(ConfigError, match="no TOML"):
        read_price_list(path)
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="too large"):
        read_price_list(path)
    other = tmp_path / "prices.json"
    other.write_text(json.dumps({"currency": "USD", "per_million": {"input": float("nan")}}))
    with pytest.raises(ConfigError, match=r"prices\.json"):
        read_price_list(Path(other))


@pytest.mark.parametrize(("amount", "text"), [("1E-7", "0.0000001"), ("10.500", "10.5"), ("100", "100"), ("0.0", "0")])
def test_amounts_as_text(amount, text):
    assert plain(Decimal(amount)) == text
