"""obole's server beside llama.cpp's: the same GGUF file, the same requests, in turn, each time a server of its own.

    python benchmarks/serve_compare.py MODEL.gguf --llama-server PATH [--rounds 3] [--requests 64] [--json FILE]

Each round starts the one, warms it up, measures it and ends it, and then the other; memory is read between them. Prompts are
random words, others in each round, the same for both. Prints medians (lowest-highest), the ratio of the medians, the read
bandwidth, and what other processes took of the machine: ratios count only where that is next to nothing. `obole serve` has
drafts on, as it comes; --obole-args="--speculate off" is without. --llama-args are by default those below, and have 2048
tokens of context for each of 8 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from compare import spread
from rich.console import Console
from rich.table import Table

from obole.bench.client import Address, Client
from obole.bench.load import Lengths, Load, Run, find_lengths, run, warm_up
from obole.bench.machine import ReadBandwidth, this_machine
from obole.bench.processes import free_address, obole_command, serving
from obole.bench.report import circumstances, to_json
from obole.bench.serve import ServeRow, disturbance, summary
from obole.cli.terminal import finite

FIGURES = {
    "requests/s": "requests_per_second",
    "output tokens/s": "output_tokens_per_second",
    "first token p50, ms": "first_token_p50_milliseconds",
    "first token p90, ms": "first_token_p90_milliseconds",
    "first token p99, ms": "first_token_p99_milliseconds",
    "between tokens p50, ms": "between_tokens_p50_milliseconds",
    "between tokens p99, ms": "between_tokens_p99_milliseconds",
    "tokens an event": "tokens_per_event",
    "this client, processors": "client_cores",
}


@dataclass(slots=True)
class Side:
    """One of the two servers: its command for an address, and its rounds."""

    name: str
    command: Callable[[Address], list[str]]
    runs: list[Run] = field(default_factory=list)


@dataclass(slots=True)
class Surroundings:
    """Values from between the servers, while neither ran."""

    read_gigabytes_per_second: list[float] = field(default_factory=list)
    others_percent: list[float] = field(default_factory=list)  # of all cores, taken by other processes


def measured(side: Side, load: Load, lengths: Lengths | None, round_: int) -> Lengths:
    """One round of one server. The lengths are those that it tells, or those given, so that both get the same prompts."""
    address = free_address()
    with serving(side.command(address), address):
        client = Client(address)

        async def work() -> tuple[Lengths, Run]:
            found = lengths or await find_lengths(client, load)
            await warm_up(client, load, found)
            return found, await run(client, load, found, round_, lambda: None)

        found, one = asyncio.run(work())
    side.runs.append(one)
    return found


def measure(sides: list[Side], load: Load, rounds: int, threads: int) -> Surroundings:
    """All rounds, the sides in turn."""
    around, meter, lengths = Surroundings(), ReadBandwidth(threads), None
    for round_ in range(rounds):
        for side in sides:
            print(f"round {round_ + 1} of {rounds}: {side.name}", file=sys.stderr)
            around.others_percent.append(psutil.cpu_percent(interval=0.5))
            around.read_gigabytes_per_second.append(meter.measure() / 1e9)
            lengths = measured(side, load, lengths, round_)
    return around


def ratios(one: ServeRow, other: ServeRow) -> dict[str, float]:
    """The medians of `one` over those of `other`."""
    found = {}
    for name in FIGURES.values():
        below = getattr(other, name).median
        found[name] = getattr(one, name).median / below if below else math.nan
    return found


def show(title: str, sides: list[Side], rows: dict[str, ServeRow], around: Surroundings) -> None:
    table = Table(box=None, title=title, title_justify="left")
    for heading in ("", *rows, "ratio"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    obole, peer = (rows[side.name] for side in sides)
    found = ratios(obole, peer)
    for label, name in FIGURES.items():
        values = [spread(list(getattr(row, name).values), 3 if name == "client_cores" else 1) for row in (obole, peer)]
        table.add_row(label, *values, f"{found[name]:.2f}")
    for label, name in (
        ("tokens a prompt", "prompt_tokens"),
        ("cached", "cached_tokens"),
        ("tokens an answer", "output_tokens"),
    ):
        table.add_row(label, *(f"{getattr(row, name):,.1f}" for row in (obole, peer)), "")
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
    print(f"read GB/s {spread(around.read_gigabytes_per_second, 1)}, others {spread(around.others_percent)} % of the machine")
    for name, row in rows.items():
        for reason, count in row.errors.items():
            print(f"{name}: {count} requests failed: {reason}")


def version_of(program: Path) -> str:
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")]
    return lines[0] if lines else "unknown"


def parse() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--llama-server", type=Path, required=True, metavar="PATH")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--concurrency", type=int, default=8)
    arguments.add_argument("--requests", type=int, default=64)
    arguments.add_argument("--prompt-tokens", type=int, default=300)
    arguments.add_argument("--output-tokens", type=int, default=128)
    arguments.add_argument("--long-prompt-every", type=float, default=0.0, metavar="SECONDS")
    arguments.add_argument("--long-prompt-tokens", type=int, default=4096)
    arguments.add_argument("--obole-args", type=shlex.split, default=[], metavar="'...'")
    arguments.add_argument("--llama-args", type=shlex.split, default=shlex.split("-c 16384 -np 8 -fa off"), metavar="'...'")
    arguments.add_argument("--json", type=Path, metavar="FILE")
    options = arguments.parse_args()
    if options.rounds < 1 or options.threads < 1:
        arguments.error("--rounds and --threads must be at least 1")
    for path in (options.model, options.llama_server):
        if not path.is_file():
            arguments.error(f"{path} is not a file")
    return options


def sides_of(options: argparse.Namespace) -> list[Side]:
    model, threads = str(options.model), ["--threads", str(options.threads)]

    def peer(address: Address) -> list[str]:
        place = ["--host", address.host, "--port", str(address.port)]
        return [str(options.llama_server), "-m", model, *place, *threads, *options.llama_args]

    return [Side("obole", lambda a: obole_command(model, a, [*threads, *options.obole_args])), Side("llama.cpp", peer)]


def main() -> None:
    options = parse()
    names = ("concurrency", "requests", "prompt_tokens", "output_tokens", "long_prompt_every", "long_prompt_tokens")
    load = Load(**{name: getattr(options, name) for name in names})
    sides = sides_of(options)
    around = measure(sides, load, options.rounds, options.threads)
    rows = {side.name: summary(load, side.runs) for side in sides}
    asked = f"{load.requests} requests, {load.concurrency} at a time, {options.threads} threads, {options.rounds} rounds"
    show(f"{options.model.name}, {asked}", sides, rows, around)
    servers: dict[str, dict[str, Any]] = {name: to_json(row) for name, row in rows.items()}
    if load.long_prompt_every:
        for side in sides:
            servers[side.name]["long"] = to_json(disturbance(load, side.runs))
            long = servers[side.name]["long"]
            print(f"{side.name}: {long['requests']} long prompts, p99 over p50 {long['between_tokens_p99_to_p50']:.2f}")
    if options.json is not None:
        document = {
            **circumstances("serve_compare", this_machine()),
            "model": options.model.name,
            "threads": options.threads,
            "rounds": options.rounds,
            "load": {name: getattr(load, name) for name in names},
            "arguments": {"obole": options.obole_args, "llama.cpp": options.llama_args},
            "peer": version_of(options.llama_server),
            "servers": servers,
            "ratios": ratios(*rows.values()),
            **dataclasses.asdict(around),
        }
        options.json.write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n")
    if any(row.errors for row in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
