"""The training layout against one that is built slot by slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from obole.distill.layout import layout, reaching
from obole.distill.losses import kept_regions, prefix_slots
from obole.distill.recipe import ground_truth
from obole.errors import ConfigError


def brute_force(regions: int, p: int, k: int, roll: int) -> dict[str, list]:
    """Slots written one after the other, as (kind, region, token of the text), and then read off."""
    slots: list[tuple[str, int, int]] = []
    predict: list[list[int]] = []
    token = 0
    for region in range(regions):
        for _ in range(p - roll if region == 0 else p):
            slots.append(("text", region, token))
            token += 1
        predict.append([len(slots) - 1])
        for ahead in range(k - 1):
            predict[-1].append(len(slots))
            slots.append(("mask", region, token + ahead))
    allow = []
    for q, (kind, region, _) in enumerate(slots):
        row = []
        for c, (other, its_region, _) in enumerate(slots):
            if c > q:
                row.append(False)
            elif other == "text":
                row.append(True)
            else:
                row.append(kind == "mask" and region == its_region)
        allow.append(row)
    return {
        "source": [source for _, _, source in slots],
        "is_mask": [kind == "mask" for kind, _, _ in slots],
        "allow": allow,
        "predict": predict,
    }


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    regions, k, p = draw(st.integers(1, 6)), draw(st.integers(2, 16)), draw(st.integers(1, 32))
    spare = draw(st.integers(0, regions - 1))
    return regions * (p + k - 1) + spare, regions, k, draw(st.integers(0, p - 1))


@given(shapes())
def test_rolled_layout_equals_one_built_slot_by_slot(shape: tuple[int, int, int, int]) -> None:
    slots, regions, k, roll = shape
    made, expected = layout(slots, regions, k, roll), brute_force(regions, ground_truth(slots, regions, k), k, roll)
    assert {name: getattr(made, name).tolist() for name in expected} == expected
    assert torch.equal(made.positions, made.source)
    assert len(made.source) <= slots


@given(shapes(), st.data())
def test_a_shorter_layout_is_the_beginning_of_the_whole(shape: tuple[int, int, int, int], data: st.DataObject) -> None:
    """And what it leaves out would not have counted."""
    length = data.draw(st.integers(1, shape[0]))
    prefix = data.draw(st.booleans())
    whole, made = layout(*shape), reaching(*shape, length, prefix=prefix)
    many = len(made.source)
    for name in ("source", "is_mask"):
        assert torch.equal(getattr(made, name), getattr(whole, name)[:many])
    assert torch.equal(made.allow, whole.allow[:many, :many])
    assert torch.equal(made.predict, whole.predict[: len(made.predict)])
    lengths = torch.tensor([length])
    if prefix:
        assert int(prefix_slots(lengths, made).sum()) == int(prefix_slots(lengths, whole).sum())
    else:
        assert len(made.predict) == max(1, int(kept_regions(lengths, whole).sum()))
    assert int(kept_regions(lengths, made).sum()) == int(kept_regions(lengths, whole).sum())


def test_every_k_and_roll_of_the_paper() -> None:
    for k in range(2, 17):
        p = ground_truth(160, 5, k)
        assert p == 32 - (k - 1)
        for roll in range(p):
            made = layout(160, 5, k, roll)
            assert made.predict.shape == (5, k)
            assert int(made.is_mask.sum()) == 5 * (k - 1)
            assert made.hidden[:, 0].tolist() == [(r + 1) * p - roll for r in range(5)]
            assert int(made.hidden.max()) < 160  # a row of as many tokens as there are slots is always enough


@pytest.mark.parametrize(("slots", "regions", "k"), [(10, 5, 3), (0, 1, 2), (160, 0, 2), (160, 5, 1), (8, 4, 16)])
def test_regions_without_room_are_refused(slots: int, regions: int, k: int) -> None:
    with pytest.raises(ConfigError, match="set more --slots, fewer --regions or a smaller --k-max"):
        layout(slots, regions, k)


@pytest.mark.parametrize("roll", [-1, 31, 100])
def test_roll_ends_before_the_first_region_does(roll: int) -> None:
    with pytest.raises(ConfigError, match="roll must be from 0 to 30"):
        layout(160, 5, 2, roll)
