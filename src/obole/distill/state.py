"""A training on disk: what it takes to go on as if it had never stopped.

Written to a file of its own and renamed, so that there is always a whole one: the newest state that was good.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from obole.distill.watch import Watch
from obole.errors import ModelError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """After `step` steps. `weights`: the parameters that are trained, by name, and `optimizer`, by the same names, as
    `torch.distributed.checkpoint.state_dict` has them, whatever the number of processes. `facts`: what must be the same in
    a run that goes on. `seconds`, `slots`: spent so far.
    """

    step: int
    facts: dict[str, Any]
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    watch: Watch
    seconds: float = 0.0
    slots: int = 0


def save(path: Path, state: State) -> None:
    """Replace the state at `path` by this one, or leave it as it was. Raises `OSError`."""
    fields = {name: getattr(state, name) for name in State.__slots__} | {"watch": asdict(state.watch), "version": VERSION}
    beside = path.with_suffix(".part")
    try:
        with beside.open("wb") as file:
            torch.save(fields, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)  # half a state only takes room, which may be what is missing
        raise


def load(path: Path) -> State:
    """The state at `path`, its tensors on the CPU. Raises `ModelError` if it can't be read."""
    try:
        fields = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if fields.pop("version") != VERSION:
            raise ModelError(f"{path} was saved by another version of obole: go on with that one, or begin anew.")
        return State(**{**fields, "watch": Watch(**fields["watch"])})
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(f"{path} cannot be read ({error}): remove it and begin anew.") from error


def check_facts(path: Path, kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises `ModelError`, naming what differs, unless a training may go on from a state."""
    for name, value in wanted.items():
        if kept.get(name) != value:
            raise ModelError(
                f"{path} belongs to a training with another {name} ({kept.get(name)}, not {value}): "
                "give the same options as before, or train into another folder."
            )
