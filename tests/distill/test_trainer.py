"""Training: exact resumption, parts of a batch that equal the whole, and what goes wrong."""

from __future__ import annotations

import copy
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.training import MASK, recipe, rows, tiny, trainer, weights
from obole.distill.parallel import World
from obole.distill.plan import places, span_and_roll
from obole.distill.recipe import Objective, Pace, Recipe
from obole.distill.state import State, check_facts, load, save
from obole.distill.trainer import Trainer
from obole.distill.watch import Diverged, Watch
from obole.errors import ConfigError, ModelError

FACTS = {"model": "m", "seed": 0}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "objective", [Objective(), Objective(targets="soft", prefix=0.5, entropy=0.1), Objective(targets="truth")]
)
def test_resumption_is_exact(tmp_path: Path, objective: Objective) -> None:
    straight = trainer(recipe(objective=objective))
    all_steps = [straight.step() for _ in range(7)]
    first = trainer(recipe(objective=objective))
    for _ in range(4):
        first.step()
    save(tmp_path / "state.pt", first.state(FACTS))
    first.step()  # lost
    second = trainer(recipe(objective=objective))
    second.restore(load(tmp_path / "state.pt"))
    later = [second.step() for _ in range(3)]
    assert [(s.step, s.k, s.roll, s.loss, s.gradient_norm, s.accepted) for s in later] == [
        (s.step, s.k, s.roll, s.loss, s.gradient_norm, s.accepted) for s in all_steps[4:]
    ]
    ours, theirs = straight.state(FACTS), second.state(FACTS)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        assert torch.equal(weight, theirs.weights[name]), name
    for name, kept in ours.optimizer["state"].items():
        for part, value in kept.items():
            assert torch.equal(value, theirs.optimizer["state"][name][part]), (name, part)
    assert ours.watch == theirs.watch


def test_training_teaches() -> None:
    """The teacher's tokens at the masks become more likely, and more of them are said."""
    taught = trainer(recipe(k_max=4), pace=Pace(learning_rate=3e-3, warmup=5))
    steps = [taught.step() for _ in range(60)]
    first, last = (sum(s.cross_entropy for s in part) / 10 for part in (steps[:10], steps[-10:]))
    assert last < 0.7 * first


def test_the_text_itself_may_be_taught_first() -> None:
    first, truth, hard = (
        trainer(recipe(objective=Objective(**made)))  # type: ignore[arg-type]
        for made in ({"truth_steps": 2}, {"targets": "truth"}, {"targets": "hard"})
    )
    losses = [[step.loss for step in (one.step(), one.step())] for one in (first, truth, hard)]
    assert losses[0] == losses[1] != losses[2]
    assert first.step().loss != truth.step().loss


def test_the_teacher_does_not_change() -> None:
    teacher = tiny(seed=3)
    before = copy.deepcopy(teacher.state_dict())
    taught = trainer(recipe(), teacher=teacher)
    for _ in range(3):
        taught.step()
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


def test_micro_batches_and_recomputation_change_nothing_but_rounding() -> None:
    whole = trainer(recipe(), pace=Pace(micro_batch=8))
    parts = trainer(recipe(), pace=Pace(micro_batch=3, checkpointing=True))
    for _ in range(3):
        a, b = whole.step(), parts.step()
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert (b.accepted, b.predictions) == (a.accepted, a.predictions)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], weight, atol=1e-5, rtol=1e-4)


def test_precision_of_products_can_be_bfloat16() -> None:
    exact, rough = trainer(recipe()), trainer(recipe(), pace=Pace(precision="bfloat16"))
    a, b = exact.step(), rough.step()
    assert a.loss != b.loss
    assert b.loss == pytest.approx(a.loss, rel=0.05)
    assert all(weight.dtype == torch.float32 for weight in weights(rough).values())


def test_numbers_that_are_none_leave_the_weights_alone() -> None:
    taught = trainer(recipe())
    taught.step()
    student = taught._student
    with torch.no_grad():
        student.layers[1].mlp.down.weight[0, 0] = float("nan")
    before = weights(taught)
    with pytest.raises(Diverged, match=r"diverged in step 2: the loss is nan.*try a lower --lr"):
        taught.step()
    assert all(torch.equal(w, weights(taught)[n]) or "down" in n for n, w in before.items())
    assert taught.steps == 1


def test_a_learning_rate_that_is_far_too_high_is_found_out() -> None:
    taught = trainer(recipe(), pace=Pace(learning_rate=30.0, warmup=0, clip=1e9))
    with pytest.raises(Diverged, match=r"The training diverged in step \d+"):
        deque((taught.step() for _ in range(300)), maxlen=0)


def test_a_batch_must_divide_among_processes() -> None:
    with pytest.raises(ConfigError, match="--batch must be a multiple of the 3 processes, and is 8"):
        Trainer(tiny(), tiny(), rows(), recipe(), Pace(), MASK, World(0, 3, torch.device("cpu")))


def test_a_batch_without_anything_to_predict_is_survived() -> None:
    bare = rows()
    bare.lengths.fill_(1)
    step = Trainer(tiny(), tiny(), bare, recipe(), Pace(), MASK, World(0, 1, torch.device("cpu"))).step()
    assert (step.loss, step.accepted, step.predictions) == (0.0, 0.0, 0)


def test_spans_and_rolls_cover_their_ranges_and_do_not_follow_each_other() -> None:
    drawn = [span_and_roll(Recipe(seed=1), step) for step in range(4000)]
    assert {k for k, _ in drawn} == set(range(2, 17))
    assert {roll for k, roll in drawn if k == 16} == set(range(17))
    assert {roll for k, roll in drawn if k == 2} == set(range(31))
    uniform = torch.tensor([[k / 16, roll / (32 - k)] for k, roll in drawn])
    assert abs(float(torch.corrcoef(uniform.T)[0, 1])) < 0.05


def test_every_row_is_read_once_in_a_round() -> None:
    made = recipe(batch=4)
    drawn = torch.cat([places(made, 10, step) for step in range(5)])
    assert sorted(drawn[:10].tolist()) == sorted(drawn[10:].tolist()) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"k_max": 1}, "--k-max must be at least 2, not 1"),
        ({"k_max": 40}, "set more --slots, fewer --regions or a smaller --k-max"),
        ({"batch": 0}, "--batch must be at least 1"),
        ({"seed": 1 << 63}, "--seed must be at most"),
    ],
)
def test_recipes_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"targets": "guess"}, "--loss must be one of hard, soft, truth, not 'guess'"),
        ({"prefix": -1.0}, "--prefix-loss must be at least 0"),
        ({"prefix": math.nan}, "--prefix-loss must be at least 0"),
        ({"entropy": math.inf}, "--entropy must be a finite number"),
    ],
)
def test_objectives_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(**values)


@pytest.mark.parametrize(
    "values", [{"learning_rate": 0}, {"learning_rate": float("nan")}, {"warmup": -1}, {"clip": 0}, {"precision": "int8"}]
)
def test_paces_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Pace(**values)


def test_rate_rises_and_then_stays() -> None:
    pace = Pace(learning_rate=1.0, warmup=4)
    assert [pace.rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Pace(learning_rate=1.0, warmup=0).rate(0) == 1.0


def test_a_state_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught, path = trainer(recipe()), tmp_path / "state.pt"
    save(path, taught.state(FACTS))
    taught.step()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, taught.state(FACTS))
    assert load(path).step == 0
    assert list(tmp_path.iterdir()) == [path]  # half a state would only take room


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:0], lambda b: b"\0" * len(b)])
def test_damaged_states_are_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "state.pt"
    save(path, trainer(recipe()).state(FACTS))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=r"state\.pt cannot be read"):
        load(path)


def test_another_training_is_not_continued(tmp_path: Path) -> None:
    state = State(step=3, facts=FACTS, weights={}, optimizer={}, watch=Watch())
    check_facts(tmp_path, state.facts, FACTS)
    with pytest.raises(ModelError, match=r"another seed \(0, not 1\): give the same options"):
        check_facts(tmp_path, state.facts, {"model": "m", "seed": 1})
