"""Runs of a training: when they end, what they leave on disk, and that going on is as if they had never stopped."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.training import PACE, recipe, rows, trainer, weights
from fakes.checkpoints import random_weights, tiny_config, write_hf
from obole.distill import training
from obole.distill.model import Decoder
from obole.distill.parallel import World
from obole.distill.recipe import Limits, Pace
from obole.distill.state import load
from obole.distill.trainer import Step, Trainer
from obole.distill.training import (
    DONE,
    STOPPED,
    TIME_UP,
    Workplace,
    facts,
    new_trainer,
    run,
    student_of,
    taken_up,
    with_weights,
)
from obole.distill.watch import Diverged
from obole.errors import ConfigError, ModelError, OboleError
from obole.weights.checkpoint import Checkpoint, open_checkpoint

HERE = World(0, 1, torch.device("cpu"))
ABOUT = {"model": "m"}


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    folder = tmp_path / "out.training"
    folder.mkdir()
    return Workplace(folder)


def go(trained: Trainer, place: Workplace, steps: int, **options: Any) -> str:
    limits = Limits(steps=steps, minutes=options.pop("minutes", None), save_every=options.pop("save_every", 2))
    return run(trained, HERE, place, limits, ABOUT, **options)


def logged(place: Workplace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in place.log.read_text().splitlines()]


def test_a_run_ends_with_its_steps_its_time_or_a_request(place: Workplace) -> None:
    taught = trainer(recipe())
    assert go(taught, place, 3) == DONE
    assert load(place.state).step == 3
    assert go(taught, place, 9, minutes=0.0) == TIME_UP
    assert load(place.state).step == 4
    assert go(taught, place, 9, stop=lambda: taught.steps == 6) == STOPPED
    assert load(place.state).step == 6
    assert go(taught, place, 6) == DONE
    assert [line["step"] for line in logged(place)] == [1, 2, 3, 4, 5, 6]


def test_steps_are_shown_and_logged(place: Workplace) -> None:
    shown: list[Step] = []
    go(trainer(recipe()), place, 3, show=shown.append)
    assert [dataclasses.asdict(step) for step in shown] == logged(place)


def test_killed_and_resumed_is_as_if_it_had_never_stopped(place: Workplace, tmp_path: Path) -> None:
    """Killed in the middle of step 6, after the state of step 4 was saved, with half a line in the log."""
    straight = trainer(recipe())
    other = Workplace(tmp_path)
    go(straight, other, 8)
    dying = trainer(recipe())

    def kill(step: Step) -> None:
        if step.step == 5:
            raise SystemExit

    with pytest.raises(SystemExit):
        go(dying, place, 8, show=kill)
    with place.log.open("a") as file:
        file.write('{"step": 6, "k"')
    state = taken_up(place, ABOUT)
    assert state is not None
    assert state.step == 4
    resumed = trainer(recipe())
    resumed.restore(state)
    assert go(resumed, place, 8) == DONE
    assert all(torch.equal(weight, weights(resumed)[name]) for name, weight in weights(straight).items())
    timeless = [[line | {"seconds": 0} for line in logged(where)] for where in (place, other)]
    assert timeless[0] == timeless[1]


def test_divergence_leaves_the_last_good_state(place: Workplace) -> None:
    taught = trainer(recipe())
    go(taught, place, 2)
    with torch.no_grad():
        taught._student.layers[0].mlp.down.weight.fill_(float("inf"))
    with pytest.raises(Diverged, match=r"try a lower --lr.*state\.pt holds the state of step 2, from which --resume goes on"):
        go(taught, place, 9)
    assert load(place.state).step == 2
    assert all(bool(weight.isfinite().all()) for weight in load(place.state).weights.values())


def test_a_state_that_gets_worse_is_not_saved(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = trainer(recipe())
    monkeypatch.setattr(Trainer, "is_well", property(lambda self: self.steps <= 2))
    with pytest.raises(SystemExit):
        go(taught, place, 9, show=lambda step: sys.exit() if step.step == 7 else None)
    assert load(place.state).step == 2


def test_a_full_disk_is_said_and_leaves_the_state_before(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = trainer(recipe())
    go(taught, place, 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "save", full)
    with pytest.raises(OboleError, match=r"No space left on device.*the state saved before is still there"):
        go(taught, place, 4)
    assert load(place.state).step == 2


def test_a_state_of_another_training_is_refused(place: Workplace) -> None:
    assert taken_up(place, ABOUT) is None
    go(trainer(recipe()), place, 1)
    with pytest.raises(ModelError, match="another model"):
        taken_up(place, {"model": "n"})


def test_tensorboard_gets_the_curves(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard itself is not needed to install obole: what is tested here is what its writer would be told."""
    told: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, log_dir: str, purge_step: int) -> None:
            assert (log_dir, purge_step) == (str(place.board), 1)

        def add_scalar(self, *what: Any) -> None:
            told.append(what)

        def close(self) -> None:
            told.append(("closed", 0.0, 0))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    go(trainer(recipe()), place, 2, board=True)
    lines = logged(place)
    assert ("loss", lines[1]["loss"], 2) in told
    assert ("accepted", lines[0]["accepted"], 1) in told
    assert told[-1][0] == "closed"


def test_tensorboard_that_is_not_installed(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard, or leave out --tensorboard"):
        go(trainer(recipe()), place, 2, board=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    config = tiny_config("qwen3")
    return open_checkpoint(write_hf(tmp_path_factory.mktemp("model"), config, random_weights(config)))


@pytest.mark.parametrize("lora", [0, 4])
def test_from_a_checkpoint_to_a_trained_model(checkpoint: Checkpoint, place: Workplace, lora: int) -> None:
    """The next token stays exactly the original's with adapters, and changes without; both learn."""
    made, about = recipe(lora=lora), facts(checkpoint, rows(), recipe(lora=lora))
    taught = new_trainer(checkpoint, rows(), 128, made, PACE, HERE, threads=1)
    assert run(taught, HERE, place, Limits(steps=4), about) == DONE
    state = taken_up(place, about)
    assert state is not None
    original, learned = student_of(checkpoint, 128, made), with_weights(student_of(checkpoint, 128, made), state)
    text = torch.randint(0, 128, (1, 12))
    assert torch.equal(next_tokens(original, text), next_tokens(learned, text)) is (lora > 0)
    assert not torch.equal(next_tokens(original, text, masked=True), next_tokens(learned, text, masked=True))
    resumed = new_trainer(checkpoint, rows(), 128, made, PACE, HERE, state, 1)
    assert all(torch.equal(weight, weights(resumed)[name]) for name, weight in weights(taught).items())
    if lora:
        assert all("adapter" in name for name in state.weights)


def next_tokens(decoder: Decoder, ids: torch.Tensor, *, masked: bool = False) -> torch.Tensor:
    n = ids.shape[1]
    masks = torch.arange(n) >= n - 3
    ids = torch.where(masks, 128, ids) if masked else ids
    with torch.no_grad():
        return decoder(ids, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril(), masks=masks if masked else None)


def test_a_state_of_other_parameters_is_refused(checkpoint: Checkpoint) -> None:
    state = new_trainer(checkpoint, rows(), 128, recipe(), Pace(), HERE, threads=1).state({})
    with pytest.raises(ModelError, match="other parameters than this model"):
        with_weights(student_of(checkpoint, 128, recipe(lora=2)), dataclasses.replace(state, weights={}))
    odd = dataclasses.replace(state, weights={**state.weights, "odd": torch.zeros(1)})
    with pytest.raises(ModelError, match="other parameters than this model"):
        with_weights(student_of(checkpoint, 128, recipe()), odd)
