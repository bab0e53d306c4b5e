"""The objective: what one pass over the layout computes is what separate plain passes compute."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from distill.training import MASK, texts, tiny
from fakes.checkpoints import ARCHITECTURES
from obole.distill.layout import Layout, layout
from obole.distill.losses import kept_regions, run_lengths, step_losses
from obole.distill.model import Decoder
from obole.distill.recipe import Objective


def causal(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a plain pass over (B, n) ids."""
    n = ids.shape[1]
    return decoder(ids, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("k", "roll"), [(2, 0), (5, 0), (5, 6), (9, 3)])
def test_layout_gives_the_logits_of_plain_passes(arch: str, k: int, roll: int) -> None:
    decoder, rows = tiny(arch), texts(2, 60)
    made = layout(60, 4, k, roll)
    ids = torch.where(made.is_mask, MASK, rows[:, made.source])
    logits = decoder(ids, made.positions, made.allow)
    for columns, hidden in zip(made.predict, made.hidden, strict=True):
        prefix = rows[:, : hidden[0]]
        masked = torch.cat([prefix, torch.full((2, k - 1), MASK)], dim=1)
        torch.testing.assert_close(logits[:, columns], causal(decoder, masked)[:, -k:], atol=1e-5, rtol=1e-5)
    plain_text = causal(decoder, rows[:, : int((~made.is_mask).sum())])
    torch.testing.assert_close(logits[:, ~made.is_mask], plain_text, atol=1e-5, rtol=1e-5)


def by_hand(student: Decoder, teacher: Decoder, rows: torch.Tensor, lengths: list[int], made: Layout, targets: str) -> float:
    """The mean loss from plain passes, a region of a text at a time, in loops."""
    losses = []
    for row, length in zip(rows, lengths, strict=True):
        for hidden in made.hidden.tolist():
            if hidden[0] >= length:
                continue
            prefix, k = row[: hidden[0]], len(hidden)
            logits = causal(student, torch.cat([prefix, torch.full((k - 1,), MASK)])[None])[0, -k:]
            said = logits[:, :MASK].argmax(-1)
            taught = causal(teacher, torch.cat([prefix, said[:-1]])[None])[0, -k:, :MASK]
            for place in range(k):
                ours = logits[place].log_softmax(-1)
                if targets == "soft":
                    p = taught[place].softmax(-1)
                    losses.append(float((p * (p.log() - ours[:MASK])).sum()))
                else:
                    right = row[hidden[place]] if targets == "truth" else taught[place].argmax()
                    losses.append(-float(ours[right]))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("targets", ["hard", "soft", "truth"])
def test_loss_is_that_of_plain_passes(targets: str) -> None:
    student, teacher, rows, made = tiny(seed=1), tiny(seed=2), texts(3, 40), layout(40, 4, 4, 3)
    lengths = [40, 17, 9]
    with torch.no_grad():
        found = step_losses(student, teacher, rows, torch.tensor(lengths), made, MASK, Objective(targets=targets))
        assert float(found.total) == pytest.approx(by_hand(student, teacher, rows, lengths, made, targets), rel=1e-4)
    assert int(found.predictions) == 4 * int(found.regions)


def test_a_teacher_that_is_never_asked_is_not_called() -> None:
    found = step_losses(tiny(), None, texts(1, 40), torch.tensor([40]), layout(40, 4, 4), MASK, Objective(targets="truth"))
    assert float(found.total.detach()) > 0


def test_prefix_loss_is_the_next_token_loss_of_the_text() -> None:
    student, rows, made, lengths = tiny(), texts(2, 40), layout(40, 4, 4, 2), [40, 11]
    text = int((~made.is_mask).sum())
    with torch.no_grad():
        bare, with_prefix = (
            step_losses(student, student, rows, torch.tensor(lengths), made, MASK, Objective(prefix=w)) for w in (0.0, 0.5)
        )
        logits, losses = causal(student, rows), []
        for b, length in enumerate(lengths):
            count = min(text, length - 1)
            losses += functional.cross_entropy(logits[b, :count], rows[b, 1 : count + 1], reduction="none").tolist()
    assert float(with_prefix.total - bare.total) == pytest.approx(0.5 * sum(losses) / len(losses), rel=1e-4)


def test_entropy_weight_adds_the_mean_entropy() -> None:
    student, rows, made = tiny(), texts(2, 40), layout(40, 4, 4)
    ids = torch.where(made.is_mask, MASK, rows[:, made.source])
    with torch.no_grad():
        bare, weighted = (
            step_losses(student, student, rows, torch.tensor([40, 40]), made, MASK, Objective(entropy=w)) for w in (0.0, 0.2)
        )
        logits = student(ids, made.positions, made.allow)[:, made.predict]
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert float(weighted.total - bare.total) == pytest.approx(0.2 * float(entropy), rel=1e-3)


def test_gradients_by_finite_differences() -> None:
    """In float64, of the mask's embedding and of a few weights; the student's own words and the targets do not change."""
    student = tiny(hidden_size=16, head_dim=4, intermediate_size=24, num_layers=1).double()
    teacher = tiny(hidden_size=16, head_dim=4, intermediate_size=24, num_layers=1, seed=5).double()
    rows, lengths, made = texts(2, 24), torch.tensor([24, 13]), layout(24, 3, 4, 2)

    def loss() -> torch.Tensor:
        objective = Objective(prefix=0.3, entropy=0.1)
        return step_losses(student, teacher, rows, lengths, made, MASK, objective).total

    loss().backward()
    embedding = student.embedding.weight
    assert embedding.grad is not None
    assert float(embedding.grad[MASK].abs().min()) > 0
    weights = [(embedding, (MASK, i)) for i in range(16)]
    weights += [(student.layers[0].attention.qkv.weight, (i, 3)) for i in range(0, 20, 5)]
    for parameter, place in weights:
        step, held = 1e-6, float(parameter.detach()[place])
        found = []
        for moved in (held + step, held - step):
            with torch.no_grad():
                parameter[place] = moved
            found.append(float(loss().detach()))
        with torch.no_grad():
            parameter[place] = held
        assert (found[0] - found[1]) / (2 * step) == pytest.approx(float(parameter.grad[place]), rel=1e-3, abs=1e-8)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    student, teacher, rows, made = tiny(seed=1), tiny(seed=2), texts(4, 40), layout(40, 4, 4, 3)
    lengths = torch.tensor([40, 5, 22, 31])
    with torch.no_grad():
        objective = Objective(prefix=0.5)
        whole = step_losses(student, teacher, rows, lengths, made, MASK, objective)
        counted = (float(whole.predictions), float(sum(min(n - 1, int((~made.is_mask).sum())) for n in lengths.tolist())))
        parts = [
            step_losses(student, teacher, rows[s], lengths[s], made, MASK, objective, counted)
            for s in (slice(0, 1), slice(1, 4))
        ]
    assert float(sum(part.total for part in parts)) == pytest.approx(float(whole.total), rel=1e-5)
    assert sum(int(part.accepted) for part in parts) == int(whole.accepted)


def test_a_batch_in_which_nothing_counts_has_a_loss_of_nought() -> None:
    student = tiny()
    found = step_losses(student, student, texts(1, 40), torch.tensor([1]), layout(40, 4, 4), MASK, Objective())
    assert float(found.total.detach()) == 0
    assert int(found.regions) == 0
    found.total.backward()
    assert all(float(p.grad.abs().max()) == 0 for p in student.parameters() if p.grad is not None)


def test_the_mask_is_neither_said_nor_taught() -> None:
    """A model whose likeliest token is always the mask: what it says and is taught is the likeliest of the others."""
    student, rows, made = tiny(), texts(1, 40), layout(40, 4, 4)
    seen: list[torch.Tensor] = []

    def loud(ids: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        seen.append(ids)
        return student(ids, *rest, **options).index_fill(-1, torch.tensor([MASK]), 50.0)

    with torch.no_grad():
        found = step_losses(loud, loud, rows, torch.tensor([40]), made, MASK, Objective())
    assert int(seen[0].max()) == MASK
    assert int(seen[1].max()) < MASK
    assert float(found.total) > 20  # the mask's share of the probability is a loss


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=16))
def test_run_lengths(holds: list[bool]) -> None:
    run = next((i for i, one in enumerate(holds) if not one), len(holds))
    assert int(run_lengths(torch.tensor(holds))) == max(run, 1)


def test_accepted_and_agreed_lengths_are_those_of_the_predictions() -> None:
    """Scripted predictions: the first two of three are certain, and the teacher says otherwise at the second."""
    made, rows = layout(8, 1, 3), torch.arange(8)[None]
    confidences, words, taught = [0.95, 0.91, 0.5], [3, 4, 5], [3, 9, 5]

    def scripted(tokens: list[int]) -> object:
        def forward(*_: object, **__: object) -> torch.Tensor:
            logits = torch.zeros(1, 3, MASK)
            for place, (token, p) in enumerate(zip(tokens, confidences, strict=True)):
                logits[0, place, token] = math.log(p / (1 - p) * (MASK - 1))
            return logits

        return forward

    found = step_losses(scripted(words), scripted(taught), rows, torch.tensor([8]), made, MASK, Objective())
    assert (int(found.accepted), int(found.agreed)) == (2, 1)


def test_regions_after_the_end_of_a_text_do_not_count() -> None:
    made = layout(160, 5, 16, 0)  # regions end at 17, 34, 51, 68 and 85
    lengths = torch.tensor([17, 18, 34, 35, 85, 86])
    assert kept_regions(lengths, made).sum(1).tolist() == [0, 1, 1, 2, 4, 5]
