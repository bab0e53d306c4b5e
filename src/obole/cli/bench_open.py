"""`obole bench serve` with requests that come by themselves: goodput, by class and at the highest rate; and its comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from obole.cli.bench import show
from obole.cli.failures import FAILURE
from obole.cli.options import WrongUsage, option_of
from obole.cli.terminal import finite, progress_bar
from obole.economics import formats
from obole.economics.energy import meter
from obole.economics.reading import lines, read_json
from obole.economics.records import Blocks
from obole.economics.runs import cost_facts
from obole.errors import InvalidRequest
from obole.prices import exact_sum, plain, read_price_list

if TYPE_CHECKING:
    from obole.bench.client import Address
    from obole.bench.compare import Change
    from obole.bench.goodput import Traffic
    from obole.bench.load import Load

TRACES = "Mooncake, Azure or agents' sessions"
CLOSED = ("concurrency", "requests", "offline")  # of a load that waits for its answers


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """The options of requests that come by themselves. `objectives`: milliseconds by name, or None."""

    rate: float | None
    arrivals: Path | None
    time_scale: float
    seconds: float
    workload: str
    objectives: Mapping[str, float | None]
    find_rate: bool
    share: float

    @property
    def open(self) -> bool:
        return self.rate is not None or self.arrivals is not None or self.find_rate

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.workload.replace(" ", "").split(",")) if self.workload else ()


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go, and what they are compared with and priced by."""

    as_json: str | None
    html: Path | None
    baseline: Mapping[str, Any] | None
    prices: Path | None


def check_open(loop: OpenLoop, given: Mapping[str, Any], outputs: Outputs) -> None:
    """Refuse options that do not go together. `given`: other options by name, None or False where they were not given."""
    if loop.open:
        for name in CLOSED:
            if given[name]:
                raise WrongUsage(name, f"{option_of(name)} is for a load that waits for answers: leave out that or --rate.")
        if loop.workload and given["prompts"]:
            raise WrongUsage("prompts", "--prompts and --workload both say what is asked: leave out one of them.")
        if loop.rate is not None and loop.arrivals is not None:
            raise WrongUsage("arrivals", "--rate and --arrivals both say when requests come: leave out one of them.")
        if loop.find_rate and loop.arrivals is not None:
            raise WrongUsage("find_rate", "--find-rate is for Poisson arrivals: leave out --arrivals.")
        if loop.find_rate and not any(loop.objectives.values()):
            raise WrongUsage("find_rate", "--find-rate needs objectives: give --ttft, --itl or --e2e.")
        return
    asked = {"workload": loop.workload, **loop.objectives, "html": outputs.html, "prices": outputs.prices}
    for name, value in asked.items():
        if value:
            raise WrongUsage(name, f"{option_of(name)} is for requests that come by themselves: add --rate or --arrivals.")


def trace_times(path: Path) -> tuple[float, ...]:
    """When the requests of a trace came, in seconds. Raises `InvalidRequest` for what does not tell."""
    from obole.bench.arrivals import overlaid

    if not path.is_file():
        raise InvalidRequest("arrivals", f"{path} is no file: name a trace of {TRACES}.")
    times: list[float] = []
    sessions: dict[int, list[float]] = {}
    for _, record in formats.records(lines(path)):
        if not isinstance(record, Blocks) or record.at is None:
            raise InvalidRequest("arrivals", f"{path} does not tell when requests came: name a trace of {TRACES}.")
        of = times if record.session is None else sessions.setdefault(record.session, [])
        of.append(record.at)
    return (*times, *overlaid(list(sessions.values())))


def read_document(path: Path) -> Mapping[str, Any]:
    """A document of `obole bench`. Raises `InvalidRequest`."""
    document = read_json(path, "baseline")
    if not isinstance(document, dict) or "benchmark" not in document or not isinstance(document.get("rows"), list):
        raise InvalidRequest("baseline", f"{path} is no document of a benchmark: name what obole bench wrote with --json.")
    return document


def compared(baseline: Mapping[str, Any] | None, document: Mapping[str, Any]) -> Sequence[Change]:
    from obole.bench.compare import compare

    return [] if baseline is None else compare(baseline, document)


def changes_json(changes: Sequence[Change]) -> dict[str, Any]:
    return {"changes": [asdict(change) for change in changes]} if changes else {}


def is_loopback(host: str) -> bool:
    """Whether the energy of this machine is that of the server."""
    return host in ("127.0.0.1", "::1", "localhost")


def model_costs(url: str, key: str) -> dict[str, Any]:
    """What a server of this project tells of its model and its steps; nothing of another server."""
    from obole.cli.top import Remote, Unreachable

    try:
        return cost_facts(Remote(url, key).all_samples())
    except Unreachable:
        return {}


def traffic_of(loop: OpenLoop, load: Load) -> Traffic:
    from obole.bench.goodput import Arrivals, Objectives, Traffic

    times = None if loop.arrivals is None else trace_times(loop.arrivals)
    arrivals = Arrivals(rate=1.0 if loop.rate is None else loop.rate, seconds=loop.seconds, times=times, scale=loop.time_scale)
    arrivals.offsets(load.seed)  # refuses what cannot be done before anything is sent
    objectives = Objectives(**dict(loop.objectives), share=loop.share)
    return Traffic(load=load, kinds=loop.kinds, arrivals=arrivals, objectives=objectives)


def cost_of(document: Mapping[str, Any], prices: Path) -> dict[str, Any]:
    """What the tokens of a run cost by a price list; servers without receipts are charged by their usage."""
    from obole.economics.runs import runs_of

    listed = read_price_list(prices)
    [run] = runs_of(document)
    amounts = {kind: listed.amount(kind, count) for kind, count in run.tokens.items()}
    total = exact_sum(amounts.values())
    return {
        "currency": listed.currency,
        "total": plain(total),
        "parts": {kind: plain(amount) for kind, amount in amounts.items()},
        "per_hour": float(total) / run.seconds * 3600,
    }


def measure_open(
    target: str, address: Address, loop: OpenLoop, load: Load, repeat: int, key: str, outputs: Outputs
) -> None:  # fmt: skip
    """Let requests come, and show what came of them; exit status 1 if any failed."""
    from obole.bench.client import Client
    from obole.bench.goodput import goodput_json, measure
    from obole.bench.machine import this_machine
    from obole.bench.report import circumstances
    from obole.cli.bench_open_tables import open_tables

    traffic = traffic_of(loop, load)
    if outputs.prices is not None:
        read_price_list(outputs.prices)
    with progress_bar() as report:
        spent = meter()
        found = measure(Client(address, key), traffic, repeat, report, search=loop.find_rate)
        joules = spent.look() if is_loopback(address.host) else {}
        costs = model_costs(address.url, key)
    document = {**circumstances("serve", this_machine()), "model": target, "repeat": repeat, **costs}
    document |= {"joules": joules} if joules else {}
    document |= goodput_json(found, traffic)
    if outputs.prices is not None:
        document["cost"] = cost_of(document, outputs.prices)
    changes = compared(outputs.baseline, document)
    document |= changes_json(changes)
    if outputs.html is not None:
        write_page(outputs.html, finite(document))
    show(outputs.as_json, document, lambda: open_tables(document, changes))
    if found.every.row.errors:
        raise typer.Exit(FAILURE)


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    from obole.economics.goodput_page import page

    try:
        path.write_text(page(document), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest("html", f"{path} cannot be written: {error.strerror}.") from None
