"""Edits of files beside llama.cpp's server: plain and drafted on both sides, in turn, the same prompts and the same GGUF file.

    python benchmarks/edit.py MODEL.gguf --llama-server PATH [--limit 8] [--rounds 3] [--threads 2] [--json FILE]

Asks the tasks of `obole bench edit`. In turn, for each task and round: obole without drafts and with, the peer plain and with
`--spec-type ngram-mod` (its best). Prints decode tokens per second (median over tasks and rounds, lowest-highest), the
ratios of medians, and on how many tasks drafts changed the answer, on either side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from obole import Engine, SamplingParams
from obole.bench.machine import ReadBandwidth
from obole.bench.speculation import counter
from obole.bench.workloads import Task, edits

SIDES = ("obole plain", "obole drafted", "peer plain", "peer ngram-mod")


@contextmanager
def peer(program: Path, model: Path, threads: int, *more: str) -> Iterator[str]:
    """A llama-server of this model; its URL. Ended when the block is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(program), "-m", str(model), "-t", str(threads), "-c", "8192", "-np", "1", "-fa", "off", "--port", str(port)]
    server = subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(url + "/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def ask_peer(url: str, task: Task) -> tuple[float, str]:
    """(decode tokens per second, answer)."""
    body = {
        "messages": [{"role": "user", "content": task.prompt}],
        "temperature": 0,
        "max_tokens": task.max_tokens,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        document: dict[str, Any] = json.load(answer)
    return float(document["timings"]["predicted_per_second"]), document["choices"][0]["message"]["content"]


def ask_obole(engine: Engine, task: Task, mode: str, tenant: str) -> tuple[float, str]:
    params = SamplingParams(max_tokens=task.max_tokens, speculate=mode)
    (result,) = engine.generate([{"role": "user", "content": task.prompt}], params, tenant=tenant)
    bill = result.receipt
    return (bill.output_tokens - 1) / max(bill.decode_seconds, 1e-9), result.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=1 << 20, help="at most, of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bandwidth = ReadBandwidth(options.threads)
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    changed = {"obole drafted": 0, "peer ngram-mod": 0}
    reads: list[float] = []
    with (
        Engine(options.model, threads=options.threads) as engine,
        peer(options.llama_server, options.model, options.threads) as plain,
        peer(options.llama_server, options.model, options.threads, "--spec-type", "ngram-mod") as drafted,
    ):
        tasks = edits(counter(engine), engine.max_context)
        tasks = [
            dataclasses.replace(task, max_tokens=min(task.max_tokens, options.output_tokens))
            for task in tasks[:: max(1, len(tasks) // options.limit)][: options.limit]
        ]
        for round_ in range(options.rounds):
            for i, task in track(list(enumerate(tasks)), f"round {round_ + 1}"):
                reads.append(bandwidth.measure())
                answers = {
                    "obole plain": ask_obole(engine, task, "off", f"plain {round_} {i}"),
                    "peer plain": ask_peer(plain, task),
                    "obole drafted": ask_obole(engine, task, "auto", f"drafted {round_} {i}"),
                    "peer ngram-mod": ask_peer(drafted, task),
                }
                for side, (rate, _) in answers.items():
                    rates[side].append(rate)
                changed["obole drafted"] += answers["obole drafted"][1] != answers["obole plain"][1]
                changed["peer ngram-mod"] += answers["peer ngram-mod"][1] != answers["peer plain"][1]
    medians = {side: statistics.median(values) for side, values in rates.items()}
    table = Table("", "decode tokens/s", "obole drafted is", "answers changed", title=str(options.model.name))
    for side in SIDES:
        spread = f"{medians[side]:.1f} ({min(rates[side]):.1f}–{max(rates[side]):.1f})"
        changes = f"{changed[side]} of {len(rates[side])}" if side in changed else ""
        table.add_row(side, spread, f"{medians['obole drafted'] / medians[side]:.2f}×", changes)
    Console().print(table)
    print(f"read bandwidth {statistics.median(reads) / 1e9:.1f} GB/s ({min(reads) / 1e9:.1f}–{max(reads) / 1e9:.1f})")
    if options.json:
        options.json.write_text(json.dumps({"rates": rates, "medians": medians, "changed": changed, "reads": reads}, indent=1))


if __name__ == "__main__":
    main()
