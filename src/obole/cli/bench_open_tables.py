"""The tables of requests that came by themselves, from the document of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from obole.bench.samples import Samples
from obole.cli.bench_serve_tables import change_table, known, print_errors
from obole.cli.bench_tables import number, print_table

if TYPE_CHECKING:
    from obole.bench.compare import Change

LATENCIES = (("first token", "first_token"), ("between tokens", "between_tokens"), ("whole answer", "whole_answer"))


def some(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else number(value)


def percent(share: float | None) -> str:
    return "–" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def samples(row: Mapping[str, Any], name: str) -> str:
    return known(Samples.of(row["repetitions"][name]))


def wanted(objectives: Mapping[str, float | None]) -> str:
    """ "ttft ≤ 500 ms, e2e ≤ 10000 ms" """
    named = [f"{name} ≤ {value:g} ms" for name in ("ttft", "itl", "e2e") if (value := objectives[name]) is not None]
    return ", ".join(named) or "none"


def hits(row: Mapping[str, Any]) -> float:
    return row["cached_tokens"] / row["prompt_tokens"] if row["prompt_tokens"] else float("nan")


def highest(document: Mapping[str, Any]) -> str:
    rate = document["highest_rate"]
    return "none of those tried" if rate is None or math.isnan(rate) else f"{number(rate)} requests/s"


def open_tables(document: Mapping[str, Any], changes: Sequence[Change]) -> None:
    """On standard output; requests that failed on standard error."""
    [every] = document["rows"]
    arrivals = document["arrivals"]
    print_table(
        ("requests that came by themselves", ""),
        [
            ("requests/s that came", number(arrivals["offered"])),
            ("requests/s that meet the objectives", samples(every, "goodput")),
            ("share that meets them %", percent(every["met"]).removesuffix(" %")),
            ("output tokens/s", samples(every, "output_tokens_per_second")),
            ("in flight, mean", number(document["in_flight"])),
        ],
    )
    print(f"\nobjectives: {wanted(document['objectives'])}; latencies count from when a request was to be sent")
    if document["highest_rate"] is not None:
        print(f"highest rate that {percent(document['objectives']['share'])} meet: {highest(document)}")
    if document["floor"] is not None:
        floor = document["floor"]
        times = ", ".join(f"{name} {some(floor[f'{key}_p99_milliseconds'])} ms" for name, key in LATENCIES)
        print(f"floor, requests with nothing to copy, p99: {times}; {percent(floor['met'])} meet the objectives")
    else:
        print("floor, requests with nothing to copy: none were sent (add chat or prose to --workload)")
    print()
    class_tables([*document["classes"], every])
    client = f"this client took {samples(every, 'client_cores')} processors"
    print(f"\n{client} and was at most {number(document['late_p99_milliseconds'])} ms late (p99)")
    if "cost" in document:
        cost = document["cost"]
        print(f"cost: {cost['total']} {cost['currency']}, {cost['per_hour']:.4g} an hour at this rate")
    print_errors(every["errors"])
    change_table(changes)


def class_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    for title, key in LATENCIES:
        cells = [(row["kind"], *(some(row[f"{key}_{p}_milliseconds"]) for p in ("p50", "p90", "p99"))) for row in rows]
        print_table((f"{title}, ms", "p50", "p90", "p99"), cells)
        print()
    print_table(
        ("class", "requests", "meet %", "prompt", "cached %", "answer", "drafts right %"),
        [
            (
                row["kind"],
                number(row["requests"]),
                percent(row["met"]).removesuffix(" %"),
                some(row["prompt_tokens"]),
                percent(hits(row)).removesuffix(" %"),
                some(row["output_tokens"]),
                percent(row["drafted_accepted"]).removesuffix(" %"),
            )
            for row in rows
        ],
    )
