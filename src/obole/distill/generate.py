"""Texts that the model writes itself: what a model is best taught on when nobody has its data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from obole.engine.engine import Engine
from obole.errors import InvalidRequest, ModelError, OboleError
from obole.text.tokenizer import Tokenizer
from obole.types import SamplingParams

AT_ONCE = 64  # texts that are written together, and then saved

Progress = Callable[[int, int], object]  # tokens so far, and wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """`tokens`: to write at least, prompts not counted. `length`: of a text at most, its prompt included.

    Text number i goes on from prompt i (modulo their number) and depends on the model, `seed` and i alone.
    """

    tokens: int
    length: int
    temperature: float = 1.0
    seed: int = 0


def write_texts(
    engine: Engine, model: str, prompts: Sequence[list[int]], writing: Writing, path: Path, progress: Progress
) -> None:
    """Write texts to `path`, after those that are there already, until they have as many tokens as are wanted.

    The file is JSON lines: first what the texts depend on, then {"ids": [...], "written": n} a text, in batches, so that no
    more than one batch is lost to an interruption. Raises `InvalidRequest` (field "prompts") if a prompt leaves no room,
    `ModelError` if the file holds texts of another kind, and `OboleError` if it can't be written.
    """
    longest = max(map(len, prompts))
    if longest >= writing.length:
        raise InvalidRequest(
            "prompts",
            f"A prompt has {longest} tokens, and a text with it at most {writing.length}: set a larger --text-length, or give "
            "shorter prompts.",
        )
    head = {"model": model, "prompts": blake3(json.dumps(list(prompts)).encode()).hexdigest(), **_lasting(writing)}
    count, done = _take_up(path, head)
    while done < writing.tokens:
        progress(done, writing.tokens)
        numbers = range(count, count + AT_ONCE)
        asked = [prompts[n % len(prompts)] for n in numbers]
        params = [_params(writing, n, len(prompt)) for n, prompt in zip(numbers, asked, strict=True)]
        answers = [result.choices[0] for result in engine.generate(asked, params)]
        lines = [
            {"ids": [*prompt, *answer.token_ids], "written": len(answer.token_ids)}
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        if not any(line["written"] for line in lines):
            raise ModelError(f"The model wrote nothing in {AT_ONCE} attempts: give it --prompts, or train on --data.")
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise OboleError(f"{path} could not be written: {error.strerror}. What it holds is kept for --resume.") from None
        count, done = count + len(lines), done + sum(len(answer.token_ids) for answer in answers)


def written_texts(path: Path, tokens: int) -> Iterator[list[int]]:
    """The texts that `write_texts` left at `path`, in order, until they have `tokens` that were written."""
    done = 0
    for line in _lines(path)[1:]:
        if done >= tokens:
            return
        entry = json.loads(line)
        done += entry["written"]
        yield entry["ids"]


def opening(tokenizer: Tokenizer, end_id: int | None) -> list[int]:
    """The prompt of a text from its beginning: what the model's texts begin with, or what ends the one before.

    Raises `InvalidRequest` (field "prompts") for a model that knows neither.
    """
    begin = end_id if tokenizer.bos_id is None else tokenizer.bos_id
    if begin is None:
        raise InvalidRequest("prompts", "This model has no token that begins a text: give it --prompts to go on from.")
    return [begin]


def _lasting(writing: Writing) -> dict[str, Any]:
    return {name: value for name, value in asdict(writing).items() if name != "tokens"}


def _params(writing: Writing, number: int, prompt: int) -> SamplingParams:
    seed = int(np.random.default_rng((writing.seed, number)).integers(2**63 - 1))
    return SamplingParams(max_tokens=writing.length - prompt, temperature=writing.temperature, seed=seed)


def _lines(path: Path) -> list[str]:
    """Whole lines: the last one may have been cut off."""
    return path.read_text("utf-8").split("\n")[:-1]


def _take_up(path: Path, head: Mapping[str, Any]) -> tuple[int, int]:
    """Number of texts and of written tokens at `path`, which is left with whole batches; begun with `head` if need be."""
    lines = _lines(path) if path.exists() else []
    if lines and json.loads(lines[0]) != head:
        raise ModelError(f"{path} holds texts that were written with other settings: give those again, or remove the file.")
    whole = (len(lines) - 1) // AT_ONCE * AT_ONCE if lines else 0
    kept = lines[: whole + 1] or [json.dumps(head)]
    beside = path.with_suffix(".part")
    beside.write_text("".join(line + "\n" for line in kept), "utf-8")
    beside.replace(path)
    return whole, sum(json.loads(line)["written"] for line in kept[1:])
