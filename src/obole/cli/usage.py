"""`obole usage`: what each tenant of a server had, and what it costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from obole.cli.bench_tables import print_table
from obole.cli.failures import guarded
from obole.cli.options import JsonFlag, WrongUsage
from obole.cli.receipts import plural
from obole.cli.terminal import note, print_json
from obole.economics.invoice import Invoice, invoice, to_csv, to_json
from obole.economics.usage_log import HOW, Tally, from_metrics
from obole.errors import ConfigError, InvalidRequest
from obole.prices import PriceList, read_price_list

USAGE_TOKENS = "obole_tenant_usage_tokens_total"

Prices = Annotated[Path | None, typer.Option(metavar="FILE", help="What tokens cost: a price list, TOML or JSON.")]


def price_file(path: Path | None) -> PriceList | None:
    """The price list of an option. Raises `InvalidRequest`."""
    try:
        return None if path is None else read_price_list(path)
    except ConfigError as error:
        raise InvalidRequest("prices", str(error)) from None


def read_logs(files: Sequence[Path], tally: Tally) -> None:
    """Take in all files, or standard input."""
    for path in files or [Path("-")]:
        if str(path) == "-":
            tally.read("standard input", sys.stdin.buffer)
            continue
        try:
            with path.open("rb") as file:
                tally.read(str(path), file)
        except OSError as error:
            raise InvalidRequest("files", f"{path} cannot be read: {error.strerror}.") from None
    if not tally.requests:
        read = "is empty" if not tally.lines else "has no request with tokens to be paid for"
        raise InvalidRequest("files", f"The log {read}: {HOW}.")


def usage_table(made: Invoice) -> None:
    """Lines, a row for each tenant's sum, and the sum of all."""
    rows: list[tuple[str, ...]] = []
    for tenant, total in made.totals.items():
        for one in (one for one in made.lines if one.tenant == tenant):
            rows.append((tenant, one.day, one.kind, f"{one.tokens:,}", "" if one.amount is None else f"{one.amount:,}"))
        rows.append((tenant, "", "all", "", "" if total is None else f"{total:,}"))
    rows.append(("all", "", "", "", "" if made.total is None else f"{made.total:,}"))
    print_table(("tenant", "day", "kind", "tokens", made.currency or "no prices"), rows)


@guarded
def usage(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[LOG]...", help="What servers wrote with --log-format json; - or none: standard input."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask this server in place of logs: all since its start.")
    ] = None,
    prices: Prices = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a CSV table on standard output, and nothing else.")] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Pass over lines that are none of a log, and count them.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Of the server. Or set OBOLE_API_KEY.", show_default="none")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokens of each tenant by day and kind, and what they cost, in lines that sum to the cent.

    Costs are by --prices, or as the log has them from a server with a price list. Days are in UTC.
    """
    if url is not None and files:
        raise WrongUsage("url", "There are a log and a server: give one of them.")
    if as_csv and as_json:
        raise WrongUsage("as_csv", "--csv and --json both take standard output: give one of them.")
    listed = price_file(prices)
    if url is not None:
        from obole.cli.top import KEY, Remote

        samples = Remote(url, api_key or os.environ.get(KEY, "")).samples(USAGE_TOKENS)
        made = invoice(from_metrics(samples, listed), None if listed is None else listed.currency)
    else:
        tally = Tally(listed, skip_bad)
        read_logs(files or [], tally)
        made = invoice(tally.usages(), tally.currency)
        if tally.skipped:
            note(f"{plural(tally.skipped, 'line')} of {tally.lines:,} skipped: they are none of a log")
    if as_json:
        print_json(to_json(made))
    elif as_csv:
        sys.stdout.write(to_csv(made))
    else:
        usage_table(made)
