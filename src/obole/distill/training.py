"""A training from its model to its saved states: what `obole distill` does, without what it shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from obole.config import MultiToken
from obole.distill.adapter import add_adapters
from obole.distill.data import Rows
from obole.distill.export import export
from obole.distill.logs import Log
from obole.distill.model import Decoder, add_mask_token, load_decoder
from obole.distill.parallel import World
from obole.distill.recipe import Limits, Pace, Recipe
from obole.distill.state import State, check_facts, load, save
from obole.distill.trainer import Step, Trainer
from obole.distill.watch import Diverged
from obole.engine.machine import usable_processors
from obole.errors import ModelError, OboleError
from obole.weights.checkpoint import Checkpoint

ALPHA = 2.0  # of adapters, for each of their ranks
DONE, TIME_UP, STOPPED = "done", "time is up", "stopped"


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folder of a training, beside the one that it exports to."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state.pt"

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def texts(self) -> Path:
        return self.folder / "texts.jsonl"

    @property
    def board(self) -> Path:
        return self.folder / "tensorboard"


def student_of(checkpoint: Checkpoint, mask_id: int, recipe: Recipe) -> Decoder:
    """The model as it is before the first step: that of the checkpoint, with a mask and, if wanted, adapters."""
    student = load_decoder(checkpoint)
    if checkpoint.config.multi_token is None:
        add_mask_token(student, mask_id, recipe.seed)
    if recipe.lora:
        add_adapters(student, recipe.lora, ALPHA * recipe.lora, recipe.seed)
    return student


def new_trainer(
    checkpoint: Checkpoint,
    rows: Rows,
    mask_id: int,
    recipe: Recipe,
    pace: Pace,
    world: World,
    state: State | None = None,
    threads: int | None = None,
) -> Trainer:
    """A trainer of the checkpoint's model, as it was when `state` was saved; None: at the beginning.

    `threads`: for torch, in this process; None: this process's share of the processors.
    """
    torch.set_num_threads(threads or max(1, usable_processors() // world.size))
    teacher = None if recipe.lora else load_decoder(checkpoint)
    trainer = Trainer(student_of(checkpoint, mask_id, recipe), teacher, rows, recipe, pace, mask_id, world)
    if state is not None:
        trainer.restore(state)
    return trainer


def facts(checkpoint: Checkpoint, rows: Rows, recipe: Recipe) -> dict[str, Any]:
    """What has to be the same for a run that goes on where another one ended."""
    # the data come last: other options make other rows, and are then what is to be named
    return {"model": checkpoint.digest.hex(), **_flat(asdict(recipe)), "data": rows.digest}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    objective = values["objective"]
    return {name: value for name, value in values.items() if name != "objective"} | {
        "loss": objective["targets"],
        "truth_steps": objective["truth_steps"],
        "prefix_loss": objective["prefix"],
        "entropy": objective["entropy"],
    }


def run(
    trainer: Trainer,
    world: World,
    place: Workplace,
    limits: Limits,
    about: dict[str, Any],
    *,
    board: bool = False,
    stop: Callable[[], bool] = lambda: False,
    show: Callable[[Step], None] = lambda _: None,
) -> str:
    """Train until `limits` or `stop()` say so; the state is then saved. Why it ended: `DONE`, `TIME_UP` or `STOPPED`.

    Raises `Diverged`, which leaves the last good state as it was, and `OboleError` if a state can't be written.
    """
    started = time.monotonic()
    if trainer.steps == 0:
        _save(trainer, world, place, about)
    with _log(world, place, trainer.steps, board) as log:
        while trainer.steps < limits.steps:
            step = _step(trainer, place)
            if log is not None:
                log.add(step)
                show(step)
            late = limits.minutes is not None and time.monotonic() - started >= 60 * limits.minutes
            stopped, late = (world.any(holds) for holds in (stop(), late))
            if trainer.steps == limits.steps or stopped or late:
                _save(trainer, world, place, about)
                return STOPPED if stopped else TIME_UP if late and trainer.steps < limits.steps else DONE
            if trainer.steps % limits.save_every == 0 and trainer.is_well:
                _save(trainer, world, place, about)
    return DONE


def _log(world: World, place: Workplace, done: int, board: bool) -> AbstractContextManager[Log | None]:
    return Log(place.log, done, place.board if board else None) if world.is_first else nullcontext()


def _step(trainer: Trainer, place: Workplace) -> Step:
    try:
        return trainer.step()
    except Diverged as error:
        kept = f"{place.state} holds the state of step {load(place.state).step}, from which --resume goes on"
        raise Diverged(f"{str(error).removesuffix('.')} ({kept}).") from None


def _save(trainer: Trainer, world: World, place: Workplace, about: dict[str, Any]) -> None:
    state = trainer.state(about)
    try:
        if world.is_first:
            save(place.state, state)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        before = "the state saved before is still there" if place.state.exists() else "there is none yet"
        raise OboleError(
            f"{place.state} could not be written, perhaps for want of room on the disk ({error}); {before}."
        ) from None


def taken_up(place: Workplace, about: Mapping[str, Any]) -> State | None:
    """The state to go on from; None if none was saved yet. Raises `ModelError` if it is one of another training."""
    if not place.state.exists():
        return None
    state = load(place.state)
    check_facts(place.state, state.facts, about)
    return state


def with_weights(student: Decoder, state: State) -> Decoder:
    """The student of `student_of`, in place, with what it has learned. Raises `ModelError` if it does not fit."""
    missing = student.load_state_dict(dict(state.weights), strict=False)
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    if missing.unexpected_keys or trained & set(missing.missing_keys):
        raise ModelError("The saved state has other parameters than this model: it was saved by another version of obole.")
    return student


def export_state(
    place: Workplace, checkpoint: Checkpoint, mask_id: int, recipe: Recipe, texts: Mapping[str, str], folder: Path, kind: str
) -> None:
    """The saved state as a model folder: see `export`.

    `kind`: type of its weights, "float32" or "bfloat16"; "auto": bfloat16, but for weights that adapters need unchanged.
    """
    student = with_weights(student_of(checkpoint, mask_id, recipe), load(place.state))
    if kind == "auto":
        kind = "float32" if recipe.lora else "bfloat16"
    known = MultiToken(mask_id, recipe.k_max)
    export(student, texts, folder, source=checkpoint, multi_token=known, dtype=getattr(torch, kind))
