"""Computes batches on a model; small ones, whose cost would be mostly Python, from recordings made once for each size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from obole.cache.pool import KVPool
from obole.engine.batch import Arrays, Ints
from obole.kernels.ops import Ops, Outputs, Recording
from obole.layers.batch import Batch
from obole.models.registry import Model

RECORDED_ROWS = 64  # larger batches spend their time in the kernels anyway
KEPT_RECORDINGS = 128  # the least recently used go first; one is some hundred addresses, the memory is shared


class Size(NamedTuple):
    """All that a recording depends on; everything else is read from its inputs when it runs."""

    rows: int
    sequences: int
    blocks: int  # columns of the block tables
    every_row: bool  # wants logits


@dataclass(frozen=True, slots=True)
class Computed:
    """`hidden`: (R, hidden) before the last norm, or `logits` (R, vocabulary) and their argmax `best` for all rows.

    Good until the next batch is computed.
    """

    hidden: torch.Tensor | None
    logits: torch.Tensor | None = None
    best: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Recorded:
    inputs: Arrays
    recording: Recording


@dataclass(slots=True)
class Steps:
    model: Model
    pool: KVPool
    ops: Ops
    _recorded: OrderedDict[Size, _Recorded] = field(default_factory=OrderedDict)

    def compute(self, batch: Arrays, every_row: bool) -> Computed:
        """Run the model on a batch; with `every_row`, up to the logits of all rows."""
        rows = batch.token_ids.shape[0]
        if rows > RECORDED_ROWS:
            return _computed(self._function(batch.as_batch(), every_row)(), every_row)
        recorded = self.recorded(batch, every_row)
        return _computed(recorded.replay(), every_row)

    def recorded(self, batch: Arrays, every_row: bool) -> Recording:
        """The recording for a batch of this size, made if need be, with the batch laid into its inputs."""
        sequences, blocks = batch.tables[0].shape
        blocks = 1 << (blocks - 1).bit_length()  # few sizes, though tables grow
        size = Size(batch.token_ids.shape[0], sequences, blocks, every_row)
        entry = self._recorded.get(size)
        if entry is None:
            inputs = _inputs(size, len(batch.tables))
            entry = _Recorded(inputs, self.ops.record(self._function(inputs.as_batch(), every_row)))
            self._recorded[size] = entry
            if len(self._recorded) > KEPT_RECORDINGS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(size)
        _lay(batch, entry.inputs)
        return entry.recording

    def _function(self, batch: Batch, every_row: bool) -> Callable[[], Outputs]:
        def run() -> Outputs:
            hidden = self.model.forward(batch, self.pool)
            if not every_row:
                return (hidden,)
            logits = self.model.logits(hidden)
            return logits, self.ops.argmax(logits)

        return run


def _computed(outputs: Outputs, every_row: bool) -> Computed:
    return Computed(None, *outputs) if every_row else Computed(*outputs)


def _inputs(size: Size, groups: int) -> Arrays:
    def vector(n: int) -> Ints:
        return np.zeros(n, dtype=np.int32)

    return Arrays(
        token_ids=vector(size.rows),
        positions=vector(size.rows),
        row_starts=vector(size.sequences + 1),
        pos_starts=vector(size.sequences),
        tables=tuple(np.full((size.sequences, size.blocks), -1, dtype=np.int32) for _ in range(groups)),
        slots=tuple(vector(size.rows) for _ in range(groups)),
    )


def _lay(batch: Arrays, inputs: Arrays) -> None:
    inputs.token_ids[:] = batch.token_ids
    inputs.positions[:] = batch.positions
    inputs.row_starts[:] = batch.row_starts
    inputs.pos_starts[:] = batch.pos_starts
    for table, given in zip(inputs.tables, batch.tables, strict=True):
        table[:, : given.shape[1]] = given
    for slots, given in zip(inputs.slots, batch.slots, strict=True):
        slots[:] = given
