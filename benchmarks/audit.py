"""How well `obole audit` predicts: workloads are answered without drafts and with them, requests and answers are written as a
log, and what the audit expects of that log is compared with what was measured.

    python benchmarks/audit.py [MODEL] [--requests 4] [--output-tokens 200] [--repeat 3] [--workloads edit,rag,prose]

Beside the speed-up, what it is made of: tokens a pass, and what passes take without drafts and with them. On a busy machine:
--threads 1 --processor-time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from obole import Engine
from obole.bench import inside, workloads
from obole.bench.speculation import SpeculationRow, answer_both, counter, questions, rows, warm_up
from obole.cli.audit import Texts
from obole.economics import formats
from obole.economics.audit import Audit
from obole.economics.findings import speed_up
from obole.economics.machine import Machine, measure
from obole.economics.reading import lines
from obole.engine.engine import Engine as AnyEngine


def tasks_of(name: str, engine: AnyEngine) -> list[workloads.Task]:
    if name == "edit":
        return workloads.edits(counter(engine), engine.max_context)
    return {"rag": workloads.documents, "extract": workloads.extractions, "prose": workloads.stories}[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workloads", default="edit,rag,prose")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true", help="for a busy machine: measure that, with --threads 1")
    asked_for = parser.parse_args()
    if asked_for.processor_time:
        time.perf_counter = time.process_time
    engine = Engine(asked_for.model, threads=asked_for.threads)
    texts = Texts(engine)
    print("         speed-up  from    to expected  off by   tokens a pass      ms a pass      with drafts")
    for name in asked_for.workloads.split(","):
        tasks = tasks_of(name, engine)
        tasks = tasks[:: max(1, len(tasks) // asked_for.requests)][: asked_for.requests]
        asked, _ = questions(engine, tasks, asked_for.output_tokens)
        machine = measure(engine)
        warm_up(engine, asked[:1])
        rounds = [
            [
                answer_both(engine, [one], [[inside.new_tenant()], [inside.new_tenant()]], name, swapped=bool((i + round_) % 2))
                for i, one in enumerate(asked)
            ]
            for round_ in range(asked_for.repeat)
        ]
        log = [(task.prompt, pair.off.results[0].text) for task, pair in zip(tasks, rounds[0], strict=True)]
        again = measure(engine)  # the machine may have changed its pace meanwhile
        show(name, rows(rounds)[0], [predicted(own, texts, log) for own in (machine, again)])
    engine.close()


def predicted(machine: Machine, texts: Texts, log: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What an audit of these prompts and answers expects of drafts, each request having a tenant of its own."""
    audit = Audit(machine, texts.prompt, texts.plain)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.jsonl")
        entries = [
            {"messages": [{"role": "user", "content": prompt}], "response": answer, "user": str(i)}
            for i, (prompt, answer) in enumerate(log)
        ]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
        for kind, record in formats.records(lines(path)):
            assert not isinstance(record, formats.Reply)
            audit.add(kind, record)
    mode: dict[str, Any] = speed_up(audit)["modes"]["auto"]
    return mode


def show(name: str, row: SpeculationRow, expected: Sequence[dict[str, Any]]) -> None:
    """A line: medians of the rounds, the speed-up's least and greatest, and the mean of what was expected."""
    found, passes, plain, drafting = (
        sum(one[key] for one in expected) / len(expected)
        for key in ("speed_up", "tokens_per_pass", "plain_tokens_per_second", "tokens_per_second")
    )
    gain, own = row.speed_up, row.tokens_per_pass.median
    milliseconds = (
        1e3 / row.off_tokens_per_second.median, 1e3 / plain,
        1e3 * own / row.on_tokens_per_second.median, 1e3 * passes / drafting,
    )  # fmt: skip
    print(
        f"{name:8} {gain.median:8.2f} {min(gain.values):5.2f} {max(gain.values):5.2f} {found:8.2f} "
        f"{100 * (found / gain.median - 1):+6.1f}%   {own:5.2f} {passes:5.2f}   "
        + "   ".join(f"{measured:5.2f} {awaited:5.2f}" for measured, awaited in (milliseconds[:2], milliseconds[2:])),
        flush=True,
    )


if __name__ == "__main__":
    main()
