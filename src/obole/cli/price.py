"""`obole price`: what a million tokens of each kind cost on a machine with a rent, by what was measured there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from obole.cli.bench import check_file
from obole.cli.bench_tables import number, print_table
from obole.cli.failures import FAILURE, guarded
from obole.cli.options import WrongUsage
from obole.cli.terminal import print_json, spinner, stderr
from obole.economics.attribution import PRICED, costs, meets, to_json
from obole.economics.energy import meter
from obole.economics.runs import Run, read_runs, run_of_server
from obole.errors import InvalidRequest

CURRENCY = "USD"


def parse_rent(text: str) -> float:
    """Money an hour from "2.10/h", "1500/month" or "2.10"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(h|hour|d|day|month))?", text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not a rent; write it like 2.10/h, 50/day or 1500/month.", param_hint="--rent")
    hours = {"d": 24, "day": 24, "month": 730}.get(match[2] or "", 1)
    return float(Decimal(match[1]) / hours)


def parse_objective(text: str) -> dict[str, float]:
    """Milliseconds by name from "ttft=500ms,itl_p90=50ms,e2e=10s"; without a percentile the 99th."""
    found = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(ttft|itl|e2e)(?:_(p50|p90|p99))?=(\d+(?:\.\d+)?)(ms|s)", part)
        if not match:
            raise typer.BadParameter(
                f"{part!r} is no objective; write ttft=500ms, itl_p90=50ms or e2e=10s.", param_hint="--objective"
            )
        found[f"{match[1]}_{match[2] or 'p99'}"] = float(match[3]) * (1e3 if match[4] == "s" else 1)
    return found


def parse_margin(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is no margin; write it like 30% or 0.3.", param_hint="--margin")
    return float(match[1]) / (100 if match[2] else 1)


def watched(url: str, key: str, seconds: float, energy: bool) -> Run:
    """What a server did in so many seconds from now, with the energy of this machine if asked for."""
    import dataclasses

    from obole.cli.top import Remote

    remote, spent = Remote(url, key), meter() if energy else None
    before, began = remote.all_samples(), time.monotonic()
    with spinner("watching the server"):
        time.sleep(seconds)
    after, took = remote.all_samples(), time.monotonic() - began
    run = run_of_server(before, after, took)
    return run if spent is None else dataclasses.replace(run, joules=spent.look())


def cheapest(runs: Sequence[Run], rent: float, objective: Mapping[str, float]) -> Run:
    """Of the runs that meet the objective, the one with the most tokens of answers for its rent. Raises `InvalidRequest`."""
    missed = [reason for run in runs if (reason := meets(run, objective))]
    good = [run for run in runs if not meets(run, objective)]
    if not good:
        raise InvalidRequest("objective", f"The objective is not met: {'; '.join(missed)}. Measure at a lower load.")
    return min(good, key=lambda run: (costs(run, rent).per_million["output"], run.name))


@guarded
def price(
    rent: Annotated[str, typer.Option(metavar="MONEY/h", help="What the machine costs, such as 2.10/h, 50/day or 1500/month.")],
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="FILE", help="What obole bench serve, throughput or latency wrote with --json; repeatable."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Watch this server of obole at work in place of it.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="X", help="How long to watch it.")] = 30.0,
    margin: Annotated[str, typer.Option(metavar="SHARE", help="To be added to all prices, such as 30%.")] = "0",
    objective: Annotated[
        str,
        typer.Option(
            metavar="NAME=TIME", help="Latencies that count, such as ttft=500ms,itl_p90=50ms; of the 99th percentile."
        ),
    ] = "",
    currency: Annotated[str, typer.Option(metavar="CODE", help="What money is called.")] = CURRENCY,
    energy: Annotated[
        bool, typer.Option("--energy", help="Tell the energy of a token too, where the machine measures it.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Of the server. Or set OBOLE_API_KEY.", show_default="none")
    ] = None,
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write a document to FILE; - is standard output, in place of tables."),
    ] = None,
) -> None:
    """What a million tokens of each kind cost: uncached and cached input, plain and copied output.

    The run's time is attributed to its tokens by what steps cost, so that prices times tokens are the rent of its time. Of
    several runs the cheapest that meets the objective counts. Also: what prefix hits, batch, tokens a pass and bits of a
    weight contribute.
    """
    hourly, added, wanted = parse_rent(rent), parse_margin(margin), parse_objective(objective)
    if bool(source) == (url is not None):
        raise WrongUsage("from", "Give what was measured: --from FILE, or --url URL of a server at work.")
    check_file(as_json)
    from obole.cli.top import KEY

    if url is not None:
        runs = [watched(url, api_key or os.environ.get(KEY, ""), seconds, energy)]
    else:
        runs = [run for path in source or [] for run in read_runs(path)]
    run = cheapest(runs, hourly, wanted)
    document = {**to_json(run, costs(run, hourly, added), hourly, currency, added), "objective": wanted, "energy": energy}
    if as_json == "-":
        print_json(document)
        return
    price_tables(document)
    if as_json is not None:
        import json

        try:
            Path(as_json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest("json", f"{as_json} cannot be written: {error.strerror}.") from None
    if energy and not document["joules"]:
        stderr().print("energy: not available, since no counter can be read on this machine or none was when it was measured")
        raise typer.Exit(FAILURE)


def price_tables(found: Mapping[str, Any]) -> None:
    """Prices, levers and energy."""
    served = f"{found['run']} for {found['seconds']:,.1f} s at {found['rent_per_hour']:.4g} {found['currency']} an hour"
    print(served + (f", margin {100 * found['margin']:.3g} %" if found["margin"] else ""))
    met = ", ".join(f"{name} ≤ {most:,.10g} ms" for name, most in found["objective"].items())
    print(f"objective: {met or 'none'}")
    if found["explained"] is not None:
        print(f"what steps cost explains {100 * found['explained']:.0f} % of the time; the rest falls on all tokens alike")
    print()
    total = sum(found["tokens"].get(kind, 0) * found["per_million"][kind] / 1e6 for kind in PRICED)
    rows = [
        (
            kind,
            number(found["per_million"][kind]),
            f"{found['tokens'].get(kind, 0):,}",
            f"{found['tokens'].get(kind, 0) * found['per_million'][kind] / 1e6:.6f}",
            "from the cost of steps" if kind in found["assumed"] else "",
        )
        for kind in PRICED
    ]
    print_table(
        ("kind", f"{found['currency']} a million", "tokens", "in all", ""), [*rows, ("all", "", "", f"{total:.6f}", "")]
    )
    if found["levers"]:
        print()
        print_table(
            ("lever", "now", "without it, times the cost", "moved to", "saves %"),
            [
                (one["name"], number(one["now"]), number(one["factor"]), number(one["moved"]), f"{100 * one['saves']:.1f}")
                for one in found["levers"]
            ],
        )
    if found["joules"]:
        made = sum(found["tokens"].get(kind, 0) for kind in ("output", "copied"))
        spent = sum(found["joules"].values())
        print(
            f"\nenergy: {spent:,.1f} J ({', '.join(found['joules'])})"
            + (f", {spent / made:.3g} J a token of answers" if made else "")
        )
