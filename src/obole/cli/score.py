"""`obole score`: how well a model predicts a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole.cli.answering import open_engine, read_text
from obole.cli.failures import guarded
from obole.cli.options import MODEL_HELP, JsonFlag, Revision, WrongUsage, with_options
from obole.cli.receipts import plural
from obole.cli.terminal import print_json, progress_bar
from obole.engine.results import perplexity_of
from obole.errors import InvalidRequest

if TYPE_CHECKING:
    from obole.engine.engine import Engine


def score_windows(engine: Engine, token_ids: list[int]) -> list[float]:
    """Natural log-probabilities of all tokens but the first of each window of the length of the context."""
    width = engine.max_scored
    logprobs: list[float] = []
    with progress_bar() as report:
        for start in range(0, len(token_ids) - 1, width):  # a last window of one token would score nothing
            report("scoring", start, len(token_ids))
            [score] = engine.score([token_ids[start : start + width]])
            logprobs += [p for p in score.logprobs if p is not None]
    return logprobs


@guarded
@with_options()
def score(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="Text to score (UTF-8); - is standard input.")],
    as_json: JsonFlag = False,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Tokens, mean negative log-likelihood (natural) and perplexity of a text.

    A text longer than the context is scored in windows of that length, side by side: the first token of each window has
    nothing before it and does not count. --max-context makes the windows shorter.
    """
    if settings.get("max_context") == 1:
        raise WrongUsage("max_context", "Scoring takes a context of at least 2 tokens, and max_context is 1.")
    text = read_text(file, "file")
    with open_engine(model, revision, settings) as engine:
        if engine.tokenizer is None:
            raise InvalidRequest("model", f"{model} has no tokenizer; use Engine.score with token ids in Python.")
        token_ids = list(engine.tokenizer.encode(text, special=True, bos=True))
        logprobs = score_windows(engine, token_ids)
    if not logprobs:
        name = "standard input" if str(file) == "-" else str(file)
        raise InvalidRequest("file", f"{name} has {plural(len(token_ids), 'token')}, and scoring takes at least 2.")
    nll = -math.fsum(logprobs) / len(logprobs)
    perplexity = perplexity_of(nll)
    if as_json:
        print_json({"tokens": len(token_ids), "scored_tokens": len(logprobs), "nll": nll, "perplexity": perplexity})
    else:
        print(f"tokens      {len(token_ids):,} ({len(logprobs):,} scored)")
        print(f"nll         {nll:.6f}")
        print(f"perplexity  {perplexity:.4f}")
