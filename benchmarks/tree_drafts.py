"""Would drafts shaped like trees pay? The model's own answers, replayed with one continuation in a draft, and with two.

    python benchmarks/tree_drafts.py MODEL [--specbench question.jsonl] [--limit 2] [--json FILE]

The second continuation is what followed the second most common branch of the same match. In a pass it needs a row of its
own for the newest token, beside those of its tokens (`--shared-root`: it does not, as with a mask in the attention). Both sides
choose lengths for the most tokens a second, by chances learnt on the way and by what rows cost: once as measured on this
machine, and once with rows that are almost free, as on a machine with far more arithmetic. Prints how many times faster than
without drafts each is, for each kind of request.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from obole.bench import inside, speculation, workloads
from obole.costmodel import StepCost
from obole.engine.engine import Engine
from obole.speculate.acceptance import Acceptance, Counts, Kind, kind_of
from obole.speculate.lengths import GAIN
from obole.speculate.proposal import Proposal
from obole.speculate.suffix import Cursor, SuffixIndex
from obole.types import SamplingParams, Source

LONGEST, LONGEST_BRANCH, LOOK_BACK = 48, 8, 64
ROWS = [1, 2, 4, 8, 16, 32, 64]
NEARLY_FREE = [1.0, 1.01, 1.03, 1.06, 1.15, 1.4, 2.0]


@dataclass(frozen=True, slots=True)
class Answer:
    kind: str
    prompt: list[int]
    output: list[int]


@dataclass(slots=True)
class Chances:
    """What is known of the proposals of one rank, in all answers and in the present one."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    own: dict[Kind, Counts] = field(default_factory=dict)

    def reckon(self, proposal: Proposal) -> np.ndarray:
        """Expected right tokens of its first 1, 2, ... tokens."""
        return np.cumsum(self.acceptance.survival(kind_of(proposal), self.own, proposal.length, len(proposal.tokens)))

    def learn(self, proposal: Proposal, truth: list[int]) -> None:
        right = agreeing(proposal.tokens, truth)
        self.acceptance.observe(kind_of(proposal), self.own, right, min(right + 1, len(proposal.tokens), len(truth)))


@dataclass(slots=True)
class Row:
    kind: str
    tokens: int = 0
    linear_steps: float = 0.0  # in steps of one row
    tree_steps: float = 0.0
    branches: int = 0  # drafted
    better: int = 0  # of them, right for longer than the first continuation


def agreeing(tokens: list[int], truth: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(tokens, truth, strict=False)) if a != b), min(len(tokens), len(truth)))


def proposals(index: SuffixIndex, text: list[int]) -> tuple[Proposal | None, Proposal | None]:
    """What came most often after the end of the text, and what came second."""
    match = index.match(LONGEST)
    if match is None:
        return None, None
    first = Proposal(Source.LOOKUP, match.length, match.support / match.total, match.tokens)
    if len(match.branches) < 2:
        return first, None
    token, count = match.branches[1]
    cursor = Cursor(index)
    cursor.advance([*text[-LOOK_BACK:], token])
    rest = cursor.match(LONGEST_BRANCH - 1)
    # twice the share: among proposals that came second, those of a half are the sure ones
    share = min(1.0, 2 * count / match.total)
    return first, Proposal(Source.MEMORY, match.length, share, [token, *(rest.tokens if rest else [])])


def best_shape(first: np.ndarray, second: np.ndarray, curve: np.ndarray, root: int) -> tuple[int, int]:
    """Tokens of both continuations that promise the most tokens a second; `second` empty: of the first alone."""
    best, shape = GAIN / curve[1], (0, 0)
    for branch in range(second.size + 1):
        gained = second[branch - 1] if branch else 0.0
        for length in range(first.size + 1):
            rows = 1 + length + (branch + root if branch else 0)
            rate = (1 + (first[length - 1] if length else 0.0) + gained) / curve[rows]
            if rate > best:
                best, shape = rate, (length, branch)
    return shape


def steps_of(answer: Answer, row: Row, chances: tuple[Chances, Chances], curve: np.ndarray, *, tree: bool, root: int) -> float:
    """Time of an answer, in steps of one row."""
    index = SuffixIndex()
    text, end = [*answer.prompt, answer.output[0]], len(answer.prompt) + len(answer.output)
    index.extend(text)
    steps = 0.0
    for one in chances:
        one.own.clear()
    while len(text) < end:
        truth = answer.output[len(text) - len(answer.prompt) :]
        first, second = proposals(index, text)
        empty = np.zeros(0)
        expected = empty if first is None else chances[0].reckon(first)
        other = empty if second is None or not tree else chances[1].reckon(second)
        length, branch = best_shape(expected, other, curve, root)
        right = agreeing(first.tokens[:length], truth[:-1]) if first else 0
        taken = right
        if branch and second is not None:
            taken = max(right, agreeing(second.tokens[:branch], truth[:-1]))
            row.branches += 1
            row.better += taken > right
        for proposal, one in zip((first, second), chances, strict=True):
            if proposal is not None:
                one.learn(proposal, truth[: taken + 1])
        steps += curve[1 + length + (branch + root if branch else 0)] / curve[1]
        text += truth[: taken + 1]
        index.extend(truth[: taken + 1])
    return steps


def compare(answers: list[Answer], cost: StepCost, root: int) -> list[Row]:
    curve = cost.curve(2 + LONGEST + LONGEST_BRANCH)
    rows: dict[str, Row] = {}
    for tree in (False, True):
        chances = (Chances(), Chances())
        for answer in answers:
            row = rows.setdefault(answer.kind, Row(answer.kind))
            steps = steps_of(answer, row, chances, curve, tree=tree, root=root)
            if tree:
                row.tree_steps += steps
            else:
                row.tokens += len(answer.output) - 1
                row.linear_steps += steps
    return list(rows.values())


def answers(engine: Engine, specbench: Path | None, limit: int, tokens: int) -> Iterator[Answer]:
    tasks = [("edit", t) for t in workloads.edits(speculation.counter(engine), engine.max_context)[: 2 * limit]]
    tasks += [("documents", t) for t in workloads.documents()[: 2 * limit]]
    tasks += [("extraction", t) for t in workloads.extractions()[: 2 * limit]]
    tasks += [("stories", t) for t in workloads.stories()[:limit]]
    if specbench is not None:
        tasks += [(f"Spec-Bench {t.kind}", t) for t in workloads.spec_bench(specbench.read_text(), None, limit)]
    for number, (kind, task) in enumerate(tasks):
        [result] = engine.generate([task.prompt], SamplingParams(max_tokens=tokens), tenant=str(number))
        if len(result.choices[0].token_ids) > 1:
            yield Answer(kind, list(result.prompt_ids), list(result.choices[0].token_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--specbench", type=Path)
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--shared-root", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with Engine(asked.model, max_context=8192) as engine:
        known = list(answers(engine, asked.specbench, asked.limit, asked.tokens))
        measured = inside.step_cost(engine)
    console, document = Console(), {}
    for name, seconds in (
        ("as measured here", [s / measured.seconds[0] for s in measured.seconds]),
        ("nearly free", NEARLY_FREE),
    ):
        rows = compare(known, StepCost(ROWS[: len(seconds)], list(seconds)), 0 if asked.shared_root else 1)
        table = Table(title=f"rows {name}: {', '.join(f'{s:.2f}' for s in seconds)} for {', '.join(map(str, ROWS))}")
        for column in ("", "one continuation", "two", "gain", "branches", "better"):
            table.add_column(column, justify="left" if not column else "right")
        for row in [*rows, total(rows)]:
            gain = row.linear_steps / row.tree_steps - 1
            linear, tree = row.tokens / row.linear_steps, row.tokens / row.tree_steps
            table.add_row(row.kind, f"{linear:.2f}", f"{tree:.2f}", f"{gain:+.1%}", str(row.branches), str(row.better))
        console.print(table)
        document[name] = [asdict(row) for row in rows]
    if asked.json is not None:
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


def total(rows: list[Row]) -> Row:
    fields = ("tokens", "linear_steps", "tree_steps", "branches", "better")
    return Row("all", **{name: sum(getattr(row, name) for row in rows) for name in fields})


if __name__ == "__main__":
    main()
