"""The few things about a running engine that only benchmarks look at; no other benchmark knows its insides."""

from __future__ import annotations

from typing import NamedTuple

from obole.config import SchedulerConfig
from obole.engine.engine import Engine, Stream
from obole.models.registry import Model


class BytesRead(NamedTuple):
    weights: int
    kv: int


def step(engine: Engine) -> None:
    """Compute one step for all requests."""
    engine._step()


def running(engine: Engine) -> int:
    """Sequences that take part in steps."""
    return engine._scheduler.num_running


def scheduling(engine: Engine) -> SchedulerConfig:
    return engine._scheduler.config


def vocab_size(engine: Engine) -> int:
    return engine._vocab_size


def model(engine: Engine) -> Model:
    return engine._runner.steps.model


def bytes_read(streams: list[Stream]) -> BytesRead:
    """What the receipts of these requests would say if they ended now."""
    tallies = [sequence.tally for stream in streams for sequence in stream._live.sequences]
    return BytesRead(sum(t.weight_bytes for t in tallies), sum(t.kv_bytes for t in tallies))
