"""Where the time of a decoding step goes: which kernels, and everything around them.

While it is measured, the engine's own functions are wrapped in stopwatches; nothing of this is in the engine. The parts are
exclusive: what a function spends in another one that is watched counts there alone, so that they sum to the step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from obole.bench.drive import check_repeat, check_sequences, decode
from obole.bench.samples import Report, Samples, silent
from obole.engine import runner, steps
from obole.engine.engine import Engine
from obole.errors import InvalidRequest
from obole.kernels.ops import Outputs, Recording
from obole.scheduler.scheduler import Scheduler

WATCHED: tuple[tuple[str, Any, str], ...] = (  # part of a step, owner of the function, its name
    ("planning", Scheduler, "plan"),
    ("building the batch", runner, "build_batch"),
    ("building the batch", runner, "logit_rows"),
    ("laying inputs", steps, "_lay"),
    ("finding the recording", steps.Steps, "recorded"),
    ("choosing", runner.Runner, "_settle_rows"),
    ("results and bytes", runner.Runner, "run"),
    ("settling", Scheduler, "settle"),
    ("delivering", Engine, "_deliver"),
)
CALLING = "calling the kernels"
OTHER = "other"
PARTS = (*dict.fromkeys(part for part, _, _ in WATCHED), CALLING, OTHER)
RECORDED = steps.RECORDED_ROWS


class Stopwatch:
    """Nanoseconds by part; one part at a time, that of the innermost function at work."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self._stack: list[str] = []
        self._mark = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*values: Any, **keywords: Any) -> Any:
            self._turn()
            self._stack.append(name)
            try:
                return function(*values, **keywords)
            finally:
                self._turn()
                self._stack.pop()

        return timed

    def book(self, kernels: Mapping[str, int]) -> None:
        """Move what kernels took from the part at work to their own account."""
        self.kernels.update(kernels)
        self.parts[self._stack[-1]] -= sum(kernels.values())

    def _turn(self) -> None:
        now = time.perf_counter_ns()
        if self._stack:
            self.parts[self._stack[-1]] += now - self._mark
        self._mark = now


@dataclass(frozen=True, slots=True)
class _TimedRecording:
    """Replays with each kernel timed. That returns no outputs, so it replays once more, off the clock."""

    recording: Recording
    watch: Stopwatch

    def replay(self) -> Outputs:
        with self.watch.part(CALLING):
            self.watch.book(self.recording.replay_timed())
        with self.watch.part("off the clock"):
            return self.recording.replay()


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """`step_microseconds` is the sum of `parts` and `kernels`, all microseconds a step, means over the steps of the
    repetition whose step took the median time. `plain_step_microseconds`: the same steps without any stopwatch."""

    sequences: int
    context: int
    steps: int
    plain_step_microseconds: Samples
    step_microseconds: float
    parts: Mapping[str, float]
    kernels: Mapping[str, float]
    not_kernel_share: Samples


def overhead(
    engine: Engine,
    sequences: Sequence[int] = (1, 16),
    context: int = 64,
    steps: int = 64,
    repeat: int = 3,
    report: Report = silent,
) -> list[OverheadRow]:
    """A row for each number of sequences. Raises `InvalidRequest` for what does not fit, or is too much for a recording.

    Timing the kernels one by one adds some 30 ns to each of them, and counts as theirs.
    """
    check_repeat(repeat)
    for count in sequences:
        if count > RECORDED:
            raise InvalidRequest("sequences", f"Steps of more than {RECORDED} rows are not recorded and cannot be taken apart.")
        check_sequences(engine, count, context, steps)
    rows = []
    for i, count in enumerate(sequences):
        report(f"{count} at once", i, len(sequences))
        rows.append(_row(engine, count, context, steps, repeat))
    return rows


def _row(engine: Engine, count: int, context: int, length: int, repeat: int) -> OverheadRow:
    plain: list[float] = []
    watches: list[Stopwatch] = []
    for round_ in range(repeat + 1):  # the first one records the steps and is not counted
        plain.append(decode(engine, count, context, length, seed=round_).seconds / length * 1e6)
        watches.append(Stopwatch())
        decode(engine, count, context, length, round_, around=partial(_watching, watches[-1]))
    plain, watches = plain[1:], watches[1:]
    totals = [_total(watch) for watch in watches]
    typical = watches[totals.index(statistics.median_low(totals))]
    return OverheadRow(
        sequences=count,
        context=context,
        steps=length,
        plain_step_microseconds=Samples.of(plain),
        step_microseconds=_total(typical) / length / 1e3,
        parts={part: typical.parts[part] / length / 1e3 for part in PARTS},
        kernels={kind: ns / length / 1e3 for kind, ns in typical.kernels.most_common()},
        not_kernel_share=Samples.of(_not_kernel(watch) / _total(watch) for watch in watches),
    )


def _not_kernel(watch: Stopwatch) -> int:
    return sum(watch.parts[part] for part in PARTS)


def _total(watch: Stopwatch) -> int:
    return _not_kernel(watch) + sum(watch.kernels.values())


@contextmanager
def _watching(watch: Stopwatch) -> Iterator[None]:
    """Within, every watched function of the engine runs on the watch."""
    with ExitStack() as stack:
        for part, owner, name in (*WATCHED, (OTHER, Engine, "_step")):
            stack.enter_context(_replaced(owner, name, watch.wrapped(part, getattr(owner, name))))
        recorded = steps.Steps.recorded

        def timed(*values: Any) -> _TimedRecording:
            return _TimedRecording(recorded(*values), watch)

        stack.enter_context(_replaced(steps.Steps, "recorded", timed))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
