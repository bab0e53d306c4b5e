"""The tables of docs/economics.md, measured anew: every piece is a command of its own, one after another.

    python benchmarks/economics.py [--pieces audits,speed-up,price,load,leak,traces] [--traces DIR]
        [--models smollm2-135m,FILE.gguf] [--gguf FILE.gguf --llama-server PATH] [--repeat 3]

- `audits`: what prefix caches find in the traces of `--traces`;
- `speed-up`: what `obole audit` expects of drafts, beside what is measured (`benchmarks/audit.py`), of each of `--models`;
- `price`: a run of `obole bench serve`, its tokens at their prices beside its rent;
- `load`: what the load generator adds to latencies (`benchmarks/null_server.py`);
- `leak`: what timing gives away of copied answers;
- `traces`: requests at the times of each trace on this server and on llama.cpp's, in turn, with the same file of weights. The
  times of a trace are stretched so that its first requests come at `--rate` a second on average, for `--seconds`.

Times are of use on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from obole.bench.processes import free_address, obole_command, serving
from obole.cli.bench_open import trace_times
from obole.economics.reading import read_json

OBOLE = (sys.executable, "-c", "from obole.cli.app import main; main()")
HERE = Path(__file__).parent
PIECES = ("audits", "speed-up", "price", "load", "leak", "traces")
KV_BYTES, TIERS = 12288, "device=8GB,ram=64GB,ssd=1000GB"  # of a token of Qwen2.5-0.5B in 16 bits
RENT = "2.10/h"
LLAMA = ("-c", "32768", "-np", "8", "-fa", "off", "--no-webui")
TRACE_LOAD = ("--workload", "chat,rag,agent,shared", "--output-tokens", "32", "--ttft", "3000", "--itl", "100")
PRICES = "currency = 'USD'\n[per_million]\ninput = 0.30\ncached = 0.03\noutput = 1.20\ncopied = 0.40\n"


def run(*command: str) -> None:
    """Raises `CalledProcessError`. What the command prints is printed."""
    subprocess.run(command, check=True)


def document(folder: Path, *command: str) -> dict[str, Any]:
    """What a command of obole writes with --json; also one that ends with another status because some requests failed."""
    path = folder / "document.json"
    path.unlink(missing_ok=True)
    done = subprocess.run([*OBOLE, *command, "--json", str(path)], stdout=subprocess.DEVNULL, check=False)
    if not path.exists():
        raise RuntimeError(f"obole {command[0]} ended with status {done.returncode}.")
    found: dict[str, Any] = read_json(path, "json")
    return found


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    shown = Table(box=None, title=title, title_justify="left")
    for i, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(shown)


def traces_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name.endswith((".jsonl", ".csv", ".tar.gz")))


def audits(options: argparse.Namespace, folder: Path) -> None:
    rows = []
    for trace in traces_in(options.traces):
        found = document(folder, "audit", str(trace), "--kv-bytes", str(KV_BYTES), "--tiers", TIERS)
        prefix, lengths = found["prefix"], found["lengths"]
        hits = ["–"] * 4
        if prefix is not None:
            hits = [f"{100 * share:.1f} %" for share in (prefix["unbounded"], *(tier["together"] for tier in prefix["tiers"]))]
        prompt = f"{lengths['prompt']['mean']:,.0f} ({lengths['prompt']['p99']:,.0f})"
        rows.append((trace.name, f"{found['requests']:,}", prompt, f"{lengths['answer']['mean']:,.1f}", *hits))
    table("prefix caches", ("trace", "requests", "prompt (p99)", "answer", "at most", "device", "with ram", "with ssd"), rows)


def speed_up(options: argparse.Namespace, _folder: Path) -> None:
    for model in options.models.split(","):
        print(f"speed-up, {Path(model).name}", flush=True)
        run(sys.executable, str(HERE / "audit.py"), model, "--repeat", str(options.repeat), "--threads", str(options.threads))


def price(options: argparse.Namespace, folder: Path) -> None:
    """Rounds of one load, each priced by itself, and charged at the prices of the first one."""
    model, threads = options.models.split(",")[0], str(options.threads)
    serve = ("--requests", "24", "--concurrency", "4", "--prompt-tokens", "200", "--output-tokens", "64", "--threads", threads)
    found = []
    for number in range(options.repeat):
        made = document(folder, "bench", "serve", model, *serve, "--seed", str(number), "--repeat", "1")
        source = folder / "run.json"
        source.write_text(json.dumps(made), encoding="utf-8")
        found.append(document(folder, "price", "--rent", RENT, "--from", str(source)))
    headings = ("seconds", "rent", "prices x tokens", "off by", "at the first one's prices", "explained")
    table(f"prices, rent {RENT}", headings, [price_row(one, found[0]["per_million"]) for one in found])
    kinds = [kind for kind, count in found[0]["tokens"].items() if count]
    rows = [(kind, f"{found[0]['tokens'][kind]:,}", f"{found[0]['per_million'][kind]:.3f}") for kind in kinds]
    table("the first round", ("kind", "tokens", "a million"), rows)


def price_row(found: dict[str, Any], prices: Mapping[str, float]) -> tuple[str, ...]:
    rent = found["rent_per_hour"] * found["seconds"] / 3600
    own, other = (
        sum(count * by[kind] / 1e6 for kind, count in found["tokens"].items()) for by in (found["per_million"], prices)
    )
    money = f"{found['seconds']:.2f}", f"{rent:.6f}", f"{own:.6f}"
    return *money, f"{100 * (own / rent - 1):+.4f} %", f"{100 * (other / rent - 1):+.1f} %", f"{100 * found['explained']:.0f} %"


def load(options: argparse.Namespace, _folder: Path) -> None:
    run(sys.executable, str(HERE / "null_server.py"), "--repeat", str(options.repeat))


def leak(options: argparse.Namespace, _folder: Path) -> None:
    model, threads = options.models.split(",")[0], str(options.threads)
    run(
        *OBOLE, "leak", model, "--question", "copied", "--prompts", "48", "--pace", "20", "--at-once", "2", "--threads", threads
    )


def traces(options: argparse.Namespace, folder: Path) -> None:
    if options.gguf is None or options.llama_server is None:
        print("traces: left out, as --gguf and --llama-server are not given", file=sys.stderr)
        return
    prices = folder / "prices.toml"
    prices.write_text(PRICES, encoding="utf-8")
    rows = []
    for trace in traces_in(options.traces):
        times = sorted(trace_times(trace))
        scale = options.seconds / (times[round(options.rate * options.seconds)] - times[0])
        common = ("--arrivals", str(trace), "--time-scale", f"{scale:.6g}", "--seconds", str(options.seconds), *TRACE_LOAD)
        for name in ("obole", "llama.cpp"):
            found = on_server(name, options, folder, (*common, "--prices", str(prices), "--repeat", str(options.repeat)))
            rows.append(trace_row(trace.name, name, found))
            print("; ".join(rows[-1]), file=sys.stderr)
    headings = (
        "trace",
        "server",
        "came/s",
        "in time/s",
        "in time",
        "first token p50, p99",
        "floor p99: first, between",
        "cached",
    )
    table("requests at the times of traces", (*headings, "cost/h"), rows)


def on_server(name: str, options: argparse.Namespace, folder: Path, asked: Sequence[str]) -> dict[str, Any]:
    """One run against a server of its own."""
    address, threads = free_address(), str(options.threads)
    command = obole_command(str(options.gguf), address, ["--threads", threads])
    if name != "obole":
        place = ("--host", address.host, "--port", str(address.port), "-t", threads)
        command = [str(options.llama_server), "-m", str(options.gguf), *place, *LLAMA]
    with serving(command, address):
        return document(folder, "bench", "serve", address.url, *asked)


def trace_row(trace: str, server: str, found: dict[str, Any]) -> tuple[str, ...]:
    [every], floor = found["rows"], found["floor"]
    first = f"{every['first_token_p50_milliseconds']:,.0f}, {every['first_token_p99_milliseconds']:,.0f} ms"
    lowest = "–"
    if floor is not None:
        lowest = f"{floor['first_token_p99_milliseconds']:,.0f}, {floor['between_tokens_p99_milliseconds']:,.1f} ms"
    cached, met = (f"{100 * share:.0f} %" for share in (every["cached_tokens"] / every["prompt_tokens"], every["met"]))
    rates = f"{found['arrivals']['offered']:.2f}", spread(every["repetitions"]["goodput"])
    return trace, server, *rates, met, first, lowest, cached, f"{found['cost']['per_hour']:.4f}"


def spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.2f} ({ordered[0]:.2f}-{ordered[-1]:.2f})"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pieces", default=",".join(PIECES))
    arguments.add_argument("--traces", type=Path, default=Path("traces"))
    arguments.add_argument("--models", default="smollm2-135m")
    arguments.add_argument("--gguf", type=Path)
    arguments.add_argument("--llama-server", type=Path)
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--rate", type=float, default=0.5, help="requests a second, of traces")
    arguments.add_argument("--seconds", type=float, default=60.0, help="of a round, of traces")
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = arguments.parse_args()
    made = dict(zip(PIECES, (audits, speed_up, price, load, leak, traces), strict=True))
    wanted = options.pieces.split(",")
    if unknown := set(wanted) - set(made):
        arguments.error(f"no piece: {', '.join(sorted(unknown))}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for piece in wanted:
            made[piece](options, folder)


if __name__ == "__main__":
    main()
