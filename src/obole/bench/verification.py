"""The proof that no draft, batch, chunk or cache changes an answer, on this machine and with this model.

Every way of asking is compared with the plain one: no drafts, alone, the whole prompt at once, nothing in the cache. What
must be equal are the token ids, why the answer ended, and the bits of all log-probabilities. Drafts are followed wherever there
are any, likely or not; memory and prediction hold the right answer with a slip every few tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from obole.bench import inside
from obole.bench.samples import Report, silent
from obole.bench.workloads import proof_prompts
from obole.engine.engine import Engine
from obole.engine.results import Choice, Result
from obole.errors import InvalidRequest
from obole.types import Grammar, SamplingParams, TokenLogprob

DRAFTED = 8  # tokens of a draft at most
CHUNK = 19  # rows of a step where prompts are read in chunks: no multiple of a block
SLIP = 7  # every so many tokens, a remembered or expected text is wrong
SHORTEST = CHUNK + 1  # tokens of a prompt
ALTERNATIVES = 2
FORM = r'\{"language": "(English|French|German|other)", "number_of_words": [0-9]{1,3}, "about": "[a-z ]{1,20}"\}'


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is asked: so many prompts, cut to so many tokens, and so many tokens of each answer."""

    prompts: int
    prompt_tokens: int
    output_tokens: int


QUICK = Extent(3, 80, 20)
FULL = Extent(6, 400, 48)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Where drafts come from. `remembered`, `predicted`: there is something for the memory and the prediction to draft from."""

    name: str
    mode: str
    remembered: bool = False
    predicted: bool = False
    grammar: bool = False


OFF = Drafting("off", "off")
WITH_MODEL = Drafting("draft", "draft")
WITH_MASKS = Drafting("mtp", "mtp")
WITH_GRAMMAR = (
    Drafting("forced", "forced", grammar=True),
    Drafting("auto with grammar", "auto", remembered=True, predicted=True, grammar=True),
)
DRAFTINGS = (
    OFF,
    Drafting("auto", "auto", remembered=True, predicted=True),
    Drafting("lookup", "lookup"),
    Drafting("memory", "memory", remembered=True),
    Drafting("prediction", "prediction", predicted=True),
)


@dataclass(frozen=True, slots=True)
class Way:
    drafting: Drafting
    sampled: bool
    batched: bool
    chunked: bool
    cached: bool


@dataclass(frozen=True, slots=True)
class Spot:
    """What stands at a place of an answer: a token, or how the answer ended before it."""

    token_id: int | None
    text: str
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...]
    ended: str


@dataclass(frozen=True, slots=True)
class Difference:
    """`position`: of the first token that differs, from 0."""

    prompt: str
    position: int
    expected: Spot
    got: Spot


@dataclass(frozen=True, slots=True)
class Outcome:
    """`fault`: why this proves nothing, although nothing differs; else empty."""

    way: Way
    drafted: int
    accepted: int
    difference: Difference | None
    fault: str

    @property
    def proved(self) -> bool:
        return self.difference is None and not self.fault


@dataclass(frozen=True, slots=True)
class Proof:
    """`prompt_tokens`: of each prompt by name."""

    prompt_tokens: dict[str, int]
    output_tokens: int
    outcomes: tuple[Outcome, ...]

    @property
    def proved(self) -> bool:
        return all(outcome.proved for outcome in self.outcomes)

    @property
    def first_failure(self) -> Outcome | None:
        """The first way in which an answer differed or, if none did, that proves nothing."""
        failures = [outcome for outcome in self.outcomes if not outcome.proved]
        return next((outcome for outcome in failures if outcome.difference is not None), failures[0] if failures else None)


def verify(engine: Engine, extent: Extent = FULL, report: Report = silent) -> Proof:
    """Ask in every way. Needs an engine that does nothing else meanwhile, and leaves it as it was.

    A model without a tokenizer gets random prompts and no grammar. Raises `InvalidRequest` for an engine without a prefix
    cache, or whose context or steps are too short for a prompt.
    """
    check_engine(engine, extent)
    room = min(extent.prompt_tokens, inside.scheduling(engine).max_batch_tokens, engine.max_context - extent.output_tokens)
    prompts = some_prompts(engine, extent.prompts, room)
    switches = list(itertools.product((False, True), repeat=4))
    ways = [Way(drafting, *switch) for drafting in applicable(engine) for switch in switches]
    expected: dict[tuple[bool, bool], list[Choice]] = {}
    outcomes: list[Outcome] = []
    asked_before = inside.new_tenant()
    with inside.always_drafting(engine, DRAFTED):
        for way in ways:
            report(describe(way), len(outcomes), len(ways))
            kind = (way.drafting.grammar, way.sampled)
            if kind not in expected:
                plain = Way(dataclasses.replace(OFF, grammar=way.drafting.grammar), way.sampled, False, False, False)
                each = [parameters(plain, i, extent, ()) for i in range(len(prompts))]
                expected[kind] = choices(ask(engine, prompts, each, inside.new_tenant(), batched=False))
            tenant = asked_before if way.cached else inside.new_tenant()
            outcomes.append(_outcome(engine, prompts, way, extent, tenant, expected[kind]))
    return Proof({name: len(ids) for name, ids in prompts.items()}, extent.output_tokens, tuple(outcomes))


def check_engine(engine: Engine, extent: Extent) -> None:
    limits = inside.scheduling(engine)
    if not limits.prefix_cache:
        raise InvalidRequest("prefix_cache", "The proof compares cached with computed prompts: leave the prefix cache on.")
    if engine.max_context < SHORTEST + extent.output_tokens:
        needed = SHORTEST + extent.output_tokens
        raise InvalidRequest("max_context", f"The proof needs a context of {needed} tokens, not {engine.max_context}.")
    if limits.max_batch_tokens < SHORTEST:
        raise InvalidRequest(
            "max_batch_tokens", f"The proof reads prompts whole and in parts: max_batch_tokens must be at least {SHORTEST}."
        )


def applicable(engine: Engine) -> list[Drafting]:
    with_grammar = WITH_GRAMMAR if engine.tokenizer is not None else ()
    with_model = [WITH_MODEL] if inside.has_draft_model(engine) else []
    with_masks = [WITH_MASKS] if inside.predicts_ahead(engine) else []
    return [*DRAFTINGS, *with_grammar, *with_model, *with_masks]


def some_prompts(engine: Engine, count: int, most: int) -> dict[str, list[int]]:
    """Prompts of up to `most` tokens by name: texts, or numbers at random that are all said twice."""
    if engine.tokenizer is not None:
        texts = proof_prompts()[:count]
        return {name: list(engine.tokenizer.encode(text, special=False, bos=True))[:most] for name, text in texts}
    rng = np.random.default_rng(0)
    prompts = {}
    for i in range(count):
        length = SHORTEST + (most - SHORTEST) * i // max(1, count - 1)
        half = rng.integers(0, inside.vocab_size(engine), -(-length // 2)).tolist()
        prompts[f"random {i + 1}"] = (half + half)[:length]
    return prompts


def parameters(way: Way, number: int, extent: Extent, prediction: Sequence[int]) -> SamplingParams:
    """Of the request for prompt `number`. Of all that the way says, the answer depends on the grammar and sampling alone."""
    drafting, sampled = way.drafting, way.sampled
    return SamplingParams(
        max_tokens=extent.output_tokens,
        ignore_eos=True,
        seed=1000 + number,
        temperature=0.8 if sampled else 0.0,
        top_p=0.95 if sampled else 1.0,
        repetition_penalty=1.1 if sampled else 1.0,
        logprobs=ALTERNATIVES,
        speculate=drafting.mode,
        prediction=tuple(prediction) if drafting.predicted else None,
        grammar=Grammar("regex", FORM) if drafting.grammar else None,
    )


def ask(
    engine: Engine, prompts: dict[str, list[int]], each: list[SamplingParams], tenant: str, *, batched: bool
) -> list[Result]:
    if batched:
        return engine.generate(list(prompts.values()), each, tenant=tenant)
    return [engine.generate(ids, params, tenant=tenant)[0] for ids, params in zip(prompts.values(), each, strict=True)]


def choices(results: Sequence[Result]) -> list[Choice]:
    return [result.choices[0] for result in results]


def with_slips(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The same, every seventh token being another one."""
    return [(token + 1) % vocab_size if i % SLIP == SLIP - 1 else token for i, token in enumerate(token_ids)]


def _outcome(
    engine: Engine,
    prompts: dict[str, list[int]],
    way: Way,
    extent: Extent,
    tenant: str,
    expected: list[Choice],
) -> Outcome:
    nearly = [with_slips(choice.token_ids, inside.vocab_size(engine)) for choice in expected]
    each = [parameters(way, i, extent, prediction) for i, prediction in enumerate(nearly)]
    if way.cached:
        engine.generate(list(prompts.values()), SamplingParams(max_tokens=1, speculate="off"), tenant=tenant)
    if way.drafting.remembered:
        for ids, answer in zip(prompts.values(), nearly, strict=True):
            inside.remember(engine, tenant, [*ids, *answer])
    with inside.small_steps(engine, CHUNK) if way.chunked else nullcontext():
        results = ask(engine, prompts, each, tenant, batched=way.batched)
    drafted = sum(sum(r.receipt.drafted.values()) for r in results)
    rejected = sum(sum(r.receipt.rejected.values()) for r in results)
    found = (difference(engine, name, one, other) for name, one, other in zip(prompts, expected, choices(results), strict=True))
    return Outcome(way, drafted, drafted - rejected, next(filter(None, found), None), fault_of(way, results, drafted))


def fault_of(way: Way, results: Sequence[Result], drafted: int) -> str:
    """Why these results prove nothing about a way of asking; empty if they do."""
    if way.drafting != OFF and not drafted:
        return "nothing was drafted"
    for result in results:
        cached = result.receipt.cached_tokens
        if bool(cached) != way.cached:
            return f"{cached} tokens of a prompt of {len(result.prompt_ids)} were in the cache"
    return ""


def difference(engine: Engine, prompt: str, expected: Choice, got: Choice) -> Difference | None:
    """The first place where two answers differ in a token or in a bit of its log-probabilities."""
    ours, theirs = ([fingerprint(entry) for entry in choice.logprobs or ()] for choice in (expected, got))
    if ours == theirs and expected.finish_reason == got.finish_reason and expected.token_ids == got.token_ids:
        return None
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    return Difference(prompt, position, _spot(engine, expected, position), _spot(engine, got, position))


def fingerprint(entry: TokenLogprob) -> tuple[object, ...]:
    """Equal for entries that are equal in every bit."""
    return entry.token_id, entry.logprob.hex(), tuple((token, logprob.hex()) for token, logprob in entry.top)


def describe(way: Way) -> str:
    """ "lookup, sampled, batched, chunked, cached"."""
    said = (("greedy", "sampled"), ("alone", "batched"), ("whole", "chunked"), ("cold", "cached"))
    which = (way.sampled, way.batched, way.chunked, way.cached)
    return ", ".join([way.drafting.name, *(words[yes] for words, yes in zip(said, which, strict=True))])


def _spot(engine: Engine, choice: Choice, position: int) -> Spot:
    entries = choice.logprobs or ()
    if position >= len(entries):
        return Spot(None, "", None, (), str(choice.finish_reason))
    entry = entries[position]
    text = "" if engine.tokenizer is None else engine.tokenizer.token_bytes(entry.token_id).decode("utf-8", "replace")
    return Spot(entry.token_id, text, entry.logprob, entry.top, "")
