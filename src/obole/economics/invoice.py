"""Invoices: tokens of tenants and days as lines of money. Every line is rounded once, and all sums hold to the cent."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from typing import Any

from obole.prices import EXACT, KINDS, PriceList, exact_sum

CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one kind that a tenant had on a day (UTC, ISO 8601; empty where it is not known), and what they come to
    exactly; None where nothing says what they cost."""

    tenant: str
    day: str
    kind: str
    tokens: int
    exact: Decimal | None


@dataclass(frozen=True, slots=True)
class Line:
    """A `Usage` with its amount in whole cents."""

    tenant: str
    day: str
    kind: str
    tokens: int
    amount: Decimal | None


@dataclass(frozen=True, slots=True)
class Invoice:
    """`totals` of tenants are the sums of their lines; `total` that of all. None where there are no prices."""

    currency: str | None
    lines: tuple[Line, ...]
    totals: Mapping[str, Decimal | None]
    total: Decimal | None


def invoice(usages: Iterable[Usage], currency: str | None) -> Invoice:
    """Lines by tenant and day. A tenant's total is its exact sum, rounded once; the cents are given to its lines by largest
    remainder, so that no line is off by a cent or more."""
    by_tenant: dict[str, list[Usage]] = {}
    for usage in sorted(usages, key=lambda u: (u.tenant, u.day, KINDS.index(u.kind))):
        by_tenant.setdefault(usage.tenant, []).append(usage)
    lines: list[Line] = []
    totals: dict[str, Decimal | None] = {}
    for tenant, own in by_tenant.items():
        exact = [usage.exact for usage in own if usage.exact is not None]
        amounts: Sequence[Decimal | None] = rounded(exact) if len(exact) == len(own) else [None] * len(own)
        lines += [Line(u.tenant, u.day, u.kind, u.tokens, amount) for u, amount in zip(own, amounts, strict=True)]
        known = [amount for amount in amounts if amount is not None]
        totals[tenant] = exact_sum(known) if len(known) == len(own) else None
    known = [amount for amount in totals.values() if amount is not None]
    total = exact_sum(known) if len(known) == len(totals) else None
    return Invoice(currency, tuple(lines), totals, total)


def rounded(exact: Sequence[Decimal]) -> list[Decimal]:
    """Whole cents whose sum is the sum rounded half to even, each less than a cent from what it stands for."""
    total = exact_sum(exact).quantize(CENT, ROUND_HALF_EVEN, EXACT)
    cents = [amount.quantize(CENT, ROUND_FLOOR, EXACT) for amount in exact]
    left = int(EXACT.divide(EXACT.subtract(total, exact_sum(cents)), CENT))
    largest = sorted(range(len(exact)), key=lambda i: (EXACT.subtract(cents[i], exact[i]), i))  # largest remainder first
    for i in largest[:left]:
        cents[i] = EXACT.add(cents[i], CENT)
    return cents


def priced(tenant: str, day: str, tokens: Mapping[str, int], prices: PriceList) -> list[Usage]:
    """The usages of a tenant on a day by a price list."""
    return [Usage(tenant, day, kind, count, prices.amount(kind, count)) for kind, count in tokens.items()]


def to_json(made: Invoice) -> dict[str, Any]:
    """Amounts are text with two decimals."""
    return {
        "currency": made.currency,
        "lines": [
            {"tenant": one.tenant, "day": one.day or None, "kind": one.kind, "tokens": one.tokens, "amount": _text(one.amount)}
            for one in made.lines
        ],
        "totals": {tenant: _text(amount) for tenant, amount in made.totals.items()},
        "total": _text(made.total),
    }


def to_csv(made: Invoice) -> str:
    """Columns tenant, day, kind, tokens, amount, currency: a row for each line, and no sums, so that a column can be added
    up. A name that a spreadsheet would take for a formula has an apostrophe in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("tenant", "day", "kind", "tokens", "amount", "currency"))
    for one in made.lines:
        tenant = f"'{one.tenant}" if one.tenant[:1] in "=+-@\t\r" else one.tenant
        writer.writerow((tenant, one.day, one.kind, one.tokens, _text(one.amount), made.currency or ""))
    return text.getvalue()


def _text(amount: Decimal | None) -> str | None:
    return None if amount is None else f"{amount:f}"
