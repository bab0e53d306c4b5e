"""obole beside llama.cpp: the same GGUF file, the same number of threads, in turn, each run a process of its own.

    python benchmarks/compare.py MODEL.gguf --peer-bin DIR [--rounds 5] [--what decode,batch16,...] [--threads 2] [--json FILE]

DIR holds `llama-bench` and `llama-batched-bench`, built for this machine. Each round runs, for each measurement, first the one
and then the other, and reads memory between them. Prints tokens per second (median, lowest-highest), the ratio of the medians,
the read bandwidth, and what other processes took of the machine: ratios count only where that is next to nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from obole.bench.machine import ReadBandwidth

OBOLE = (sys.executable, "-c", "from obole.cli.app import main; main()", "bench")


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: arguments for both sides, and where their output has the tokens per second."""

    obole: tuple[str, ...]
    obole_rate: Callable[[dict[str, Any]], float]
    peer: tuple[str, ...]  # the program first
    peer_rate: Callable[[dict[str, Any]], float]


def decoding(context: int, tokens: int = 128) -> Case:
    return Case(
        ("latency", "--prompt-tokens", "1", "--context", str(context), "--output-tokens", str(tokens)),
        lambda document: float(document["rows"][0]["decode_tokens_per_second"]),
        ("llama-bench", "-p", "0", "-n", str(tokens), "-d", str(context)),
        lambda line: float(line["avg_ts"]),
    )


def prompting(tokens: int) -> Case:
    return Case(
        ("latency", "--prompt-tokens", str(tokens), "--context", "0", "--output-tokens", "1"),
        lambda document: float(document["rows"][0]["prefill_tokens_per_second"]),
        ("llama-bench", "-p", str(tokens), "-n", "0", "-d", "0"),
        lambda line: float(line["avg_ts"]),
    )


def batch(sequences: int, prompt: int = 128, tokens: int = 64) -> Case:
    sizes = ("--sequences", str(sequences), "--prompt-tokens", str(prompt), "--output-tokens", str(tokens))
    return Case(
        ("throughput", *sizes),
        lambda document: float(document["rows"][-1]["decode_tokens_per_second"]),
        ("llama-batched-bench", "-npp", str(prompt), "-ntg", str(tokens), "-npl", str(sequences)),
        lambda line: float(line["speed_tg"]),
    )


@dataclass(slots=True)
class Measured:
    """A value for each round. The last two were taken between the two sides, while neither ran."""

    obole: list[float] = field(default_factory=list)  # tokens per second
    peer: list[float] = field(default_factory=list)
    read_gigabytes_per_second: list[float] = field(default_factory=list)
    others_percent: list[float] = field(default_factory=list)  # of all cores, taken by other processes


CASES = {
    "decode": decoding(0),
    "decode-2048": decoding(2048),
    "batch16": batch(16),
    "prompt512": prompting(512),
    "prompt4096": prompting(4096),
}


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with status {done.returncode}: {done.stderr.strip()[-2000:]}{done.stdout[-500:]}")
    return done.stdout


def run_obole(case: Case, model: Path, threads: int) -> float:
    name, *rest = case.obole
    command = [*OBOLE, name, str(model), *rest, "--repeat", "1", "--threads", str(threads), "--json", "-"]
    return case.obole_rate(json.loads(output_of(command)))


def run_peer(case: Case, model: Path, threads: int, folder: Path) -> float:
    program, *rest = case.peer
    command = [str(folder / program), "-m", str(model), "-t", str(threads), *rest]
    if program == "llama-bench":
        [line] = json.loads(output_of([*command, "-fa", "0", "-r", "1", "-o", "json"]))
    else:
        text = output_of([*command, "-c", "8192", "--output-format", "jsonl"])
        line = json.loads(next(one for one in text.splitlines() if one.startswith("{")))
    return case.peer_rate(line)


def spread(values: list[float], digits: int = 0) -> str:
    low, middle, high = (f"{v:,.{digits}f}" for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}–{high})"


def parse() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--peer-bin", type=Path, required=True, metavar="DIR")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--what", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--json", type=Path, metavar="FILE")
    options = arguments.parse_args()
    options.what = options.what.split(",")
    for name in options.what:
        if name not in CASES:
            arguments.error(f"there is no measurement {name!r}; there are {', '.join(CASES)}")
    if options.rounds < 1 or options.threads < 1:
        arguments.error("--rounds and --threads must be at least 1")
    for program in {CASES[name].peer[0] for name in options.what}:
        if not (options.peer_bin / program).is_file():
            arguments.error(f"{options.peer_bin} has no {program}")
    if not options.model.is_file():
        arguments.error(f"{options.model} is not a file")
    return options


def main() -> None:
    options = parse()
    meter = ReadBandwidth(options.threads)
    found: dict[str, Measured] = {name: Measured() for name in options.what}
    for round_ in range(options.rounds):
        for name, measured in found.items():
            print(f"round {round_ + 1} of {options.rounds}: {name}", file=sys.stderr)
            measured.obole.append(run_obole(CASES[name], options.model, options.threads))
            measured.others_percent.append(psutil.cpu_percent(interval=0.5))
            measured.read_gigabytes_per_second.append(meter.measure() / 1e9)
            measured.peer.append(run_peer(CASES[name], options.model, options.threads, options.peer_bin))
    title = f"{options.model.name}, {options.threads} threads, {options.rounds} rounds"
    table = Table(box=None, title=title, title_justify="left")
    for heading in ("tokens/s", "obole", "llama.cpp", "ratio", "read GB/s", "others, % of the machine"):
        table.add_column(heading, justify="right" if heading != "tokens/s" else "left", no_wrap=True)
    for name, m in found.items():
        ratio = statistics.median(m.obole) / statistics.median(m.peer)
        read, others = spread(m.read_gigabytes_per_second, 1), spread(m.others_percent)
        table.add_row(name, spread(m.obole), spread(m.peer), f"{ratio:.2f}", read, others)
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
    if options.json is not None:
        rows = [{"what": name, **dataclasses.asdict(measured)} for name, measured in found.items()]
        document = {"model": options.model.name, "threads": options.threads, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
