"""How well `obole audit` predicts: workloads are answered without drafts and with them, requests and answers are written as a
log, and what the audit expects of that log is compared with what was measured.

    python benchmarks/audit.py [MODEL] [--requests 4] [--output-tokens 200] [--workloads edit,rag,prose]

On a busy machine: --threads 1 --processor-time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from obole import Engine
from obole.bench import inside, workloads
from obole.bench.speculation import answer_both, counter, questions, rows, warm_up
from obole.cli.audit import Texts
from obole.economics import formats
from obole.economics.audit import Audit
from obole.economics.findings import speed_up
from obole.economics.machine import measure
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
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--workloads", default="edit,rag,prose")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true", help="for a busy machine: measure that, with --threads 1")
    asked_for = parser.parse_args()
    if asked_for.processor_time:
        time.perf_counter = time.process_time
    engine = Engine(asked_for.model, threads=asked_for.threads)
    texts = Texts(engine)
    machine = measure(engine)
    measured, logs = {}, {}
    for name in asked_for.workloads.split(","):
        tasks = tasks_of(name, engine)[:: max(1, len(tasks_of(name, engine)) // asked_for.requests)][: asked_for.requests]
        asked, _ = questions(engine, tasks, asked_for.output_tokens)
        warm_up(engine, asked[:1])
        rounds = [
            [
                answer_both(engine, [one], [[inside.new_tenant()], [inside.new_tenant()]], name, swapped=bool((i + round_) % 2))
                for i, one in enumerate(asked)
            ]
            for round_ in range(asked_for.repeat)
        ]
        measured[name] = rows(rounds)[0]
        logs[name] = [(task.prompt, pair.off.results[0].text) for task, pair in zip(tasks, rounds[0], strict=False)]
    again = measure(engine)  # the machine may have changed its pace meanwhile
    print(f"{'':8} {'measured':>9} {'expected':>9} {'off by %':>9}   tokens a pass")
    for name, log in logs.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "log.jsonl")
            entries = [
                {"messages": [{"role": "user", "content": prompt}], "response": answer, "user": str(i)}
                for i, (prompt, answer) in enumerate(log)
            ]
            path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
            expected = []
            for own in (machine, again):
                audit = Audit(own, texts.prompt, texts.plain)
                for kind, record in formats.records(lines(path)):
                    assert not isinstance(record, formats.Reply)
                    audit.add(kind, record)
                expected.append(speed_up(audit)["modes"]["auto"])
        row = measured[name]
        found = sum(one["speed_up"] for one in expected) / 2
        passes = sum(one["tokens_per_pass"] for one in expected) / 2
        off = 100 * (found / row.speed_up.median - 1)
        print(f"{name:8} {row.speed_up.median:9.2f} {found:9.2f} {off:+9.1f}   {row.tokens_per_pass.median:.2f} {passes:.2f}")
    engine.close()


if __name__ == "__main__":
    main()
