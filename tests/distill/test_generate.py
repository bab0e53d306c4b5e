"""Texts that a model writes itself: the same ones, however often the writing was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.engines import TinyEngine
from obole.distill import generate
from obole.distill.generate import Writing, write_texts, written_texts
from obole.errors import InvalidRequest, ModelError, OboleError

PROMPTS = [[1], [5, 6, 7]]
WRITING = Writing(tokens=200, length=20, seed=3)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "AT_ONCE", 4)


def write(engine: Any, path: Path, writing: Writing = WRITING, prompts: list[list[int]] = PROMPTS, model: str = "m") -> None:
    write_texts(engine, model, prompts, writing, path, lambda *_: None)


def test_texts_go_on_from_their_prompts(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    engine, path = tiny_engine("llama"), tmp_path / "texts.jsonl"
    write(engine, path)
    entries = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert len(entries) % 4 == 0
    assert sum(entry["written"] for entry in entries) >= 200 > sum(entry["written"] for entry in entries[:-4])
    for number, entry in enumerate(entries):
        prompt, ids = PROMPTS[number % 2], entry["ids"]
        assert ids[: len(prompt)] == prompt
        assert len(ids) == len(prompt) + entry["written"] <= 20
        assert len(ids) == 20 or ids[-1] in engine._eos_ids  # whoever ends a text says so
    assert len({tuple(entry["ids"]) for entry in entries}) > len(entries) // 2
    texts = list(written_texts(path, 30))
    assert texts == [entry["ids"] for entry in entries[: len(texts)]]
    assert (
        sum(entry["written"] for entry in entries[: len(texts)])
        >= 30
        > sum(entry["written"] for entry in entries[: len(texts) - 1])
    )


def test_an_interruption_changes_nothing(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    engine, whole, cut = tiny_engine("llama"), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write(engine, whole)
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:7]) + lines[7][:10])  # in the middle of a line, and of a batch
    write(engine, cut)
    assert cut.read_text() == whole.read_text()
    write(engine, cut)  # nothing is left to do
    assert cut.read_text() == whole.read_text()


def test_more_tokens_are_asked_for_later(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    engine, once, twice = tiny_engine("llama"), tmp_path / "once.jsonl", tmp_path / "twice.jsonl"
    write(engine, once)
    write(engine, twice, Writing(tokens=50, length=20, seed=3))
    write(engine, twice)
    assert once.read_text() == twice.read_text()


@pytest.mark.parametrize(
    "other",
    [
        {"writing": Writing(tokens=200, length=20, seed=4)},
        {"writing": Writing(tokens=200, length=30, seed=3)},
        {"writing": Writing(tokens=200, length=20, seed=3, temperature=0.5)},
        {"prompts": [[1], [5, 6, 8]]},
        {"model": "n"},
    ],
)
def test_texts_of_another_kind_are_not_mixed_in(tiny_engine: TinyEngine, tmp_path: Path, other: dict[str, Any]) -> None:
    engine, path = tiny_engine("llama"), tmp_path / "texts.jsonl"
    write(engine, path)
    before = path.read_text()
    with pytest.raises(ModelError, match="written with other settings: give those again, or remove the file"):
        write(engine, path, **other)
    assert path.read_text() == before


def test_a_full_disk_is_said(tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(path: Path, mode: str = "r", **rest: Any) -> Any:
        if mode == "a":
            raise OSError(28, "No space left on device")
        return opened(path, mode, **rest)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OboleError, match=r"texts\.jsonl could not be written: No space left on device"):
        write(tiny_engine("llama"), tmp_path / "texts.jsonl")


def test_a_prompt_must_leave_room(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="A prompt has 20 tokens, and a text with it at most 20"):
        write(tiny_engine("llama"), tmp_path / "texts.jsonl", prompts=[[5] * 20])
