"""Invoices sum to the cent, whatever is on them."""

from __future__ import annotations

import csv
import io
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from obole.economics.invoice import Usage, invoice, priced, rounded, to_csv, to_json
from obole.prices import KINDS, PriceList, exact_sum

exacts = st.lists(st.decimals(0, 10**9, places=9), max_size=30)
usages = st.lists(
    st.builds(
        Usage,
        st.sampled_from(("a", "b", "=c")),
        st.sampled_from(("2026-12-01", "2026-12-02", "")),
        st.sampled_from(KINDS),
        st.integers(0, 10**12),
        st.decimals(0, 10**6, places=8),
    ),
    max_size=20,
)


@given(exacts)
def test_rounding_keeps_the_sum(exact):
    cents = rounded(exact)
    assert sum(cents) == exact_sum(exact).quantize(Decimal("0.01"))
    assert all(abs(c - e) < Decimal("0.01") and c == c.quantize(Decimal("0.01")) for c, e in zip(cents, exact, strict=True))


@given(usages)
def test_all_sums_hold_to_the_cent(found):
    made = invoice(found, "USD")
    for tenant, total in made.totals.items():
        assert total == sum(line.amount for line in made.lines if line.tenant == tenant)
        assert abs(total - exact_sum(u.exact for u in found if u.tenant == tenant)) <= Decimal("0.005")
    assert made.total == sum(made.totals.values())
    assert sum(line.tokens for line in made.lines) == sum(u.tokens for u in found)
    rows = list(csv.DictReader(io.StringIO(to_csv(made))))
    assert sum(Decimal(row["amount"]) for row in rows) == made.total
    assert not any(row["tenant"].startswith("=") for row in rows)
    shown = to_json(made)
    assert Decimal(shown["total"] or 0) == sum(Decimal(line["amount"]) for line in shown["lines"])


def test_the_cents_go_where_most_is_missing():
    third = Decimal(1) / Decimal(300)
    assert rounded([third, third, third]) == [Decimal("0.01"), Decimal("0.00"), Decimal("0.00")]
    assert rounded([Decimal("0.004"), Decimal("0.006")]) == [Decimal("0.00"), Decimal("0.01")]
    assert rounded([]) == []


def test_without_prices_there_are_tokens_only():
    made = invoice([Usage("a", "2026-12-01", "input", 5, None), Usage("b", "", "output", 1, Decimal("0.5"))], None)
    assert made.totals == {"a": None, "b": Decimal("0.50")}
    assert made.total is None
    assert to_csv(made).splitlines()[1] == "a,2026-12-01,input,5,,"


def test_a_price_list_makes_lines():
    prices = PriceList("USD", dict.fromkeys(KINDS, Decimal(2)))
    assert priced("a", "", {"input": 500_000}, prices) == [Usage("a", "", "input", 500_000, Decimal(1))]
