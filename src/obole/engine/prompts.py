"""From what a caller may hand over (text, token ids, chat messages) to checked requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from obole.config import MultiToken
from obole.errors import InvalidRequest
from obole.text.templates import ChatTemplate
from obole.text.tokenizer import Tokenizer
from obole.types import SamplingParams

# Bytes of the longest tokens in common vocabularies (runs of blanks). More than so many for each token of the context, and
# some for a start, cannot fit; rendering and tokenising them would take long to find out.
BYTES_PER_TOKEN = 128
BYTES_AT_LEAST = 1 << 16

Message: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a string, a list of numbers and a list of messages are one; any other list holds prompts."""
    if isinstance(prompts, str | bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        return [cast(Prompt, prompts)]
    if prompts and all(_is_number(p) for p in prompts):
        return [cast(Prompt, prompts)]
    if prompts and all(isinstance(p, Mapping) for p in prompts):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def prompt_ids(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    vocab_size: int,
    *,
    tools: Tools | None = None,
) -> tuple[int, ...]:
    """Token ids of one prompt. `tools`: those that the chat template shows to the model.

    Raises `InvalidRequest` for anything that has none or has ids out of range.
    """
    if tools and not _is_chat(prompt):
        raise InvalidRequest("tools", "tools are shown to the model by its chat template: give chat messages with them.")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("prompt", "This model has no tokenizer: give token ids instead of text.")
        ids = tokenizer.encode(prompt, special=True, bos=True)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidRequest("prompt", f"A prompt is text, token ids or chat messages, not {type(prompt).__name__}.")
    elif _is_chat(prompt):
        if template is None:
            raise InvalidRequest("messages", "This model has no chat template: give a plain prompt instead (--raw).")
        ids = template.encode(cast("Sequence[Message]", prompt), tools=tools)
    else:
        ids = [_checked_id("prompt", p, vocab_size) for p in prompt]
    if not ids:
        raise InvalidRequest("prompt", "The prompt is empty: give at least one token.")
    return tuple(ids)


def held_tokens(
    prompt: Prompt, ids: Sequence[int], params: SamplingParams, template: ChatTemplate | None, tools: Tools | None = None
) -> int:
    """Leading tokens of a prompt, which are `ids`, that its request wants to have held: up to the end of the message that it
    names. Where the template does not take the messages up to there alone, it is the whole prompt.
    """
    if params.hold_seconds is None:
        return 0
    count = params.hold_messages
    if count is None or template is None or not _is_chat(prompt) or count >= len(prompt):
        return len(ids)
    try:
        part = template.encode(cast("Sequence[Message]", prompt)[:count], add_generation_prompt=False, tools=tools)
    except InvalidRequest:
        return len(ids)
    return next((i for i, (a, b) in enumerate(zip(part, ids, strict=False)) if a != b), min(len(part), len(ids)))


def check_params(params: SamplingParams, vocab_size: int, has_tokenizer: bool) -> None:
    """What can only be checked against a model. Raises `InvalidRequest` naming the field."""
    for token in params.logit_bias:
        _checked_id("logit_bias", token, vocab_size)
    for token in params.stop_token_ids:
        _checked_id("stop_token_ids", token, vocab_size)
    if params.stop and not has_tokenizer:
        raise InvalidRequest("stop", "This model has no tokenizer, so stop strings cannot be found: use stop_token_ids.")


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and any(isinstance(p, Mapping) for p in prompt)


def check_multi_token(params: SamplingParams, model: MultiToken | None) -> None:
    """Raise `InvalidRequest` for more tokens in one pass than the model was taught, which is one where `model` is None."""
    by_mode = params.mtp not in (None, "off")
    if model is None and (by_mode or params.speculate == "mtp"):
        name = "mtp" if by_mode else "speculate"
        problem = f"{name} is {getattr(params, name)}, but this model predicts one token at a time"
        raise InvalidRequest(name, f"{problem}: leave it out, or use a model made by `obole distill`.")
    if model is not None and params.mtp_tokens is not None and params.mtp_tokens > model.most:
        problem = f"mtp_tokens is {params.mtp_tokens}, and this model was taught at most {model.most} tokens"
        raise InvalidRequest("mtp_tokens", f"{problem}: ask for no more.")


def prediction_ids(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Token ids of the expected text; none if there is none. Raises `InvalidRequest` for ids out of range."""
    prediction = params.prediction
    if prediction is None:
        return ()
    if isinstance(prediction, str):
        if tokenizer is None:
            raise InvalidRequest("prediction", "This model has no tokenizer: give the prediction as token ids.")
        return tuple(tokenizer.encode(prediction, special=False))
    return tuple(_checked_id("prediction", p, vocab_size) for p in prediction)


def oversize(texts: Iterable[str], max_context: int) -> int | None:
    """Bytes of texts that cannot fit into a context, however they become tokens, which would take long; else None."""
    count = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return count if count > BYTES_PER_TOKEN * max_context + BYTES_AT_LEAST else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _checked_id(field: str, value: object, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise InvalidRequest(field, f"{field} has {value!r}, which is not a token id from 0 to {vocab_size - 1}.")
    return value
