"""A command line whose engine is a script: no weights, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import obole
from obole.cli.commands import app
from obole.engine.results import Choice, Delta, EngineInfo, Score
from obole.engine.results import Result as Answer
from obole.types import FinishReason, Receipt, SamplingParams
from obole.weights import hub

SIZES = {"parameters": 134_500_000, "weight_bytes": 98_400_000, "kv_bytes": 2 * 10**9, "kv_tokens": 91_000}
NAMES = {"model": "fake", "architecture": "llama", "weights_digest": "abc", "kernels": "reference", "kv_dtype": "bfloat16"}
INFO = EngineInfo(**NAMES, **SIZES, threads=2, kv_bytes_per_token=23_040, max_context=64, load_seconds=0.5)


def encode(text: str, *, special: bool, bos: bool) -> list[int]:
    assert special
    return [1] * bos + list(text.encode())


@dataclass
class Script:
    """What the fake engine will do, and what it was asked."""

    pieces: list[str] = field(default_factory=lambda: ["Hello", " wor", "ld"])  # one delta each
    before_piece: Callable[[int], None] = lambda _: None  # may raise
    has_chat_template: bool = True
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(encode=encode))
    load: Callable[[], None] = lambda: None  # may raise
    opened: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    scored: list[list[int]] = field(default_factory=list)
    closed: int = 0


def receipt(tokens: int) -> Receipt:
    return Receipt(
        prompt_tokens=12,
        cached_tokens=8,
        computed_tokens=4,
        unread_tokens=0,
        output_tokens=tokens,
        sources={"model": tokens},
        forward_passes=tokens + 1,
        weight_bytes=98_400_000 * (tokens + 1),
        kv_bytes=5_000_000,
        preemptions=0,
        recomputed_tokens=0,
        queued_seconds=0.0,
        prefill_seconds=0.25,
        decode_seconds=0.5,
        total_seconds=0.75,
        seed=7,
    )


class FakeStream:
    """Gives each choice the script's pieces in turn.

    Like the engine's stream, once it is closed or cancelled it has only the deltas that say so, with the result in the last.
    A request to cancel that comes while a step is computed counts before the next one; here no step is of use by itself, as
    with those that read a long prompt, so that nothing comes of the one that is interrupted.
    """

    def __init__(self, script: Script, params: SamplingParams) -> None:
        self.script, self.n = script, params.n
        self.given = [0] * params.n
        self.turn = 0
        self.ended = [False] * params.n
        self.result: Answer | None = None
        self.cancelled = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if all(self.ended):
            raise StopIteration
        index, self.turn = self.turn % self.n, self.turn + 1
        if not self.cancelled:
            self.script.before_piece(self.turn)
        if self.cancelled:
            index = self.ended.index(False)
            return self.end(index, "", (), FinishReason.CANCELLED)
        piece = self.script.pieces[self.given[index]]
        self.given[index] += 1
        if self.given[index] == len(self.script.pieces):
            return self.end(index, piece, (self.turn,), FinishReason.STOP)
        return Delta(index, piece, (self.turn,))

    def end(self, index: int, piece: str, tokens: tuple[int, ...], reason: FinishReason) -> Delta:
        self.ended[index] = True
        if all(self.ended):
            self.finish()
        return Delta(index, piece, tokens, reason, self.result)

    def finish(self) -> None:
        choices = [
            Choice(i, "".join(self.script.pieces[:count]), tuple(range(count)), self.reason(count), None, receipt(count))
            for i, count in enumerate(self.given)
        ]
        self.result = Answer("request-1", tuple(range(12)), tuple(choices))

    def reason(self, count: int) -> FinishReason:
        return FinishReason.STOP if count == len(self.script.pieces) else FinishReason.CANCELLED

    def close(self) -> None:
        self.cancelled |= self.result is None

    def cancel(self) -> None:
        self.close()

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.result is None:
            self.finish()


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()

    class FakeEngine:
        def __init__(self, model: str, *, revision: str | None, progress: Any, **settings: Any) -> None:
            progress("reading", 1, 2)
            script.opened.append((model, {"revision": revision, **settings}))
            script.load()
            self.info, self.max_context, self.max_scored = INFO, INFO.max_context, INFO.max_context
            self.tokenizer, self.has_chat_template = script.tokenizer, script.has_chat_template

        def stream(self, prompt: Any, params: SamplingParams) -> FakeStream:
            script.asked.append((prompt, params))
            return FakeStream(script, params)

        def score(self, inputs: list[list[int]]) -> list[Score]:
            script.scored += inputs
            return [Score(tuple(ids), (None, *[-2.0] * (len(ids) - 1)), receipt(0)) for ids in inputs]

        def __enter__(self) -> FakeEngine:
            return self

        def __exit__(self, *_: object) -> None:
            script.closed += 1

    entries = [
        (SimpleNamespace(name=name, licence="Apache-2.0", source=f"somewhere/{name}"), path, count)
        for name, path, count in (("smollm2-135m", Path("/cache/smollm2.gguf"), 98_362_432), ("other-1b", None, 0))
    ]
    monkeypatch.setitem(vars(obole), "Engine", FakeEngine)
    monkeypatch.setattr(hub, "list_models", lambda: entries)
    return script


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command line with `stdin` on its standard input, which is not a terminal."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("OBOLE_DEBUG", raising=False)

    def run(*arguments: str, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run
