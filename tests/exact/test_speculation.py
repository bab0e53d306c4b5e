"""Invariant 2, for equality: with drafts, right, wrong or mad, an answer has the tokens, text and bits that it has without."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from exact.common import check_idle, fingerprint, fingerprints, random_params, random_prompt
from fakes.checkpoints import random_weights, tiny_config, write_hf
from fakes.drafters import Says, inject, oracle
from obole import Engine, SamplingParams
from obole.speculate.controller import always
from obole.speculate.proposal import Proposal
from obole.types import FinishReason, Source

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]
VOCAB = 128
PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "cold": {"temperature": 0.3, "top_p": 0.95},
    "top-k": {"temperature": 1.5, "top_k": 20},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.5, "min_p": 0.05},
    "frequency +2": {"frequency_penalty": 2.0},
    "frequency -2": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "all": dict(
        temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.1
    ),
}


def off(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, speculate="off")


def spoilt(every: int):
    """Every so many-th token of the answer is drafted wrong; 0: none."""
    return lambda place, token: token ^ 1 if every and place % every == every - 1 else token


def drafted(results) -> int:
    return sum(sum(c.receipt.drafted.values()) for r in results for c in r.choices)


def rejected(results) -> int:
    return sum(sum(c.receipt.rejected.values()) for r in results for c in r.choices)


def with_oracle(engine: Engine, prompts, params, every: int, length: int):
    """The answers without drafts, and those with the drafts of somebody who knows nearly everything."""
    expected = engine.generate(prompts, [off(p) for p in params])
    answers = {r.prompt_ids: r.token_ids for r in expected}
    inject(engine, oracle(answers, spoilt(every)), length)
    return expected, engine.generate(prompts, params)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", PARAMS)
def test_every_way_of_choosing(tiny_engine, arch, name):
    """Log-probabilities too, right after a wrong draft, and at the bonus token that follows a draft wholly right."""
    engine = tiny_engine(arch, prefix_cache=False)
    rng = random.Random(1)
    prompts = [*(random_prompt(rng, rng.randint(1, 40), VOCAB) for _ in range(3)), [9, 8] * 15]
    common = SamplingParams(max_tokens=25, logprobs=5, ignore_eos=True, **PARAMS[name])
    params = [dataclasses.replace(common, seed=i) for i in range(len(prompts))]
    expected = engine.generate(prompts, [off(p) for p in params])
    for every, length in ((0, 8), (3, 64), (1, 3)):
        inject(engine, oracle({r.prompt_ids: r.token_ids for r in expected}, spoilt(every)), length)
        results = engine.generate(prompts, params)
        assert fingerprints(results) == fingerprints(expected)
        assert drafted(results) > 50
        right = sum(r.receipt.sources.get("lookup", 0) for r in results)
        assert right == drafted(results) - rejected(results)
        assert (rejected(results) == 0) is (every == 0)
        assert right > 0 or every == 1
    check_idle(engine)


@pytest.mark.parametrize(("arch", "length"), list(zip(ARCHITECTURES, [1, 3, 8, 64], strict=True)))
def test_the_engines_own_drafters(tiny_engine, arch, length):
    """Repetitive prompts, asked again and again, so that lookup and memory have something to say, right or wrong."""
    engine = tiny_engine(arch)
    engine._controller.lengths = always(length)
    rng = random.Random(2)
    unit = random_prompt(rng, 12, VOCAB)
    prompts = [unit * 4, unit * 3 + unit[:5]]
    sources: dict[str, int] = {}
    for turn, name in enumerate(("greedy", "greedy", "sampled", "cold", "presence", "all")):
        params = SamplingParams(max_tokens=40, logprobs=4, ignore_eos=True, seed=turn // 2, **PARAMS[name])
        expected = engine.generate(prompts, off(params))
        prediction = tuple(t ^ (i % 7 == 3) for i, t in enumerate(expected[0].token_ids))
        results = engine.generate(prompts, [dataclasses.replace(params, prediction=prediction), params])
        assert fingerprints(results) == fingerprints(expected), name
        for result in results:
            for source, count in result.receipt.sources.items():
                sources[source] = sources.get(source, 0) + count
            assert result.receipt.draft_seconds > 0
            assert result.receipt.draftless_passes <= result.receipt.sources["model"]
    assert set(sources) == {"model", "lookup", "memory", "prediction"}
    check_idle(engine)


def test_a_ban_on_the_drafted_token(tiny_engine):
    engine = tiny_engine("llama", prefix_cache=False)
    prompt = random_prompt(random.Random(3), 20, VOCAB)
    free = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=3, seed=1)
    (first,) = engine.generate(prompt, off(free))
    for banned in first.token_ids[1:6]:
        params = dataclasses.replace(free, logit_bias={banned: -100.0})
        (expected,) = engine.generate(prompt, off(params))
        inject(engine, oracle({first.prompt_ids: first.token_ids}, spoilt(0)), 8)
        (result,) = engine.generate(prompt, params)
        assert fingerprints([result]) == fingerprints([expected])
        assert banned not in result.token_ids
        assert rejected([result]) > 0


def test_equal_rows_of_the_head(tmp_path):
    """Where two tokens are always equally likely, the lower id is chosen, whichever of them is drafted."""
    config = tiny_config("llama")
    weights = random_weights(config, seed=1, scale=0.25)
    head = weights["lm_head.weight"]
    head[1::2] = head[::2]  # 2 i + 1 is the twin of 2 i
    with Engine(write_hf(tmp_path / "twins", config, weights), prefix_cache=False) as engine:
        prompts = [random_prompt(random.Random(s), 20, VOCAB) for s in range(4)]
        for sampled in ({}, {"temperature": 0.8}):
            params = [SamplingParams(max_tokens=40, logprobs=2, ignore_eos=True, seed=s, **sampled) for s in range(4)]
            for every in (1, 3, 0):  # the draft wrong by one is the twin
                expected, results = with_oracle(engine, prompts, params, every, 6)
                assert fingerprints(results) == fingerprints(expected)
        greedy = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
        assert all(token % 2 == 0 for r in greedy for token in r.token_ids)
        check_idle(engine)


def test_streaming_equals_not_streaming(tiny_engine):
    engine = tiny_engine("qwen3")
    prompt = random_prompt(random.Random(4), 33, VOCAB)
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=3, n=3, ignore_eos=True, logprobs=3)
    (expected,) = engine.generate(prompt, off(params))
    inject(engine, oracle({expected.prompt_ids: expected.choices[1].token_ids}, spoilt(6)), 5)
    for _ in range(2):
        (whole,) = engine.generate(prompt, params)
        deltas = list(engine.stream(prompt, params))
        assert fingerprints([whole, deltas[-1].result]) == fingerprints([expected, expected])
        for choice in deltas[-1].result.choices:
            mine = [d for d in deltas if d.index == choice.index]
            assert tuple(t for d in mine for t in d.token_ids) == choice.token_ids
            told = [s for d in mine for s in d.sources]
            assert {str(s): told.count(s) for s in set(told)} == choice.receipt.sources
            assert [d.finish_reason for d in mine if d.finish_reason] == [choice.finish_reason]
    check_idle(engine)


# -- drafters that are wrong on purpose ------------------------------------------------------------------------------------


def wrong(rng: random.Random):
    """Random tokens, as many as may be drafted."""
    return lambda _: Says(lambda _, most: Proposal(Source.MEMORY, 5, 1.0, [rng.randrange(VOCAB) for _ in range(most)]))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_what_was_turned_down_is_never_found_in_the_cache(tiny_engine, arch):
    engine, cold = tiny_engine(arch), tiny_engine(arch, prefix_cache=False)
    rng = random.Random(5)
    said: list[tuple[list[int], list[int]]] = []  # tokens so far, what was drafted to follow them

    def propose(seq, most):
        tokens = [rng.randrange(VOCAB) for _ in range(most)]
        said.append((list(seq.tokens), tokens))
        return Proposal(Source.LOOKUP, 5, 1.0, tokens)

    inject(engine, lambda _: Says(propose), 48)  # three blocks ahead
    prompt = random_prompt(rng, 29, VOCAB)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, logprobs=3)
    (result,) = engine.generate(prompt, params)
    assert rejected([result]) > 500
    answer = [*prompt, *result.token_ids]
    once = SamplingParams(max_tokens=3, logprobs=3, speculate="off")
    (whole,) = engine.generate(answer, dataclasses.replace(params, speculate="off"))
    assert whole.receipt.cached_tokens == (len(answer) - 1) // 16 * 16  # and all of the answer is found
    assert fingerprints([whole]) == fingerprints(cold.generate(answer, dataclasses.replace(params, speculate="off")))
    for tokens, draft in said[::4]:
        asked = [*tokens, *draft]
        common = next(i for i, (a, b) in enumerate(itertools.zip_longest(asked, answer)) if a != b)
        (again,) = engine.generate(asked[:200], once)
        assert again.receipt.cached_tokens <= min(common, len(answer))  # what the draft had in common with the answer
        assert fingerprints([again]) == fingerprints(cold.generate(asked[:200], once))
    check_idle(engine)


@pytest.mark.parametrize(("arch", "blocks"), [("llama", 10), ("gemma3", 44)])
@pytest.mark.parametrize("every", [0, 4, 1])
def test_preempted_in_the_middle_of_drafting(tiny_engine, arch, blocks, every):
    roomy = tiny_engine(arch, prefix_cache=False)
    tight = tiny_engine(arch, blocks=blocks, max_batch_tokens=16)
    rng = random.Random(6)
    prompts = [random_prompt(rng, rng.randint(5, 20), VOCAB) for _ in range(8)]
    params = [
        SamplingParams(max_tokens=90, temperature=1.0, seed=i, ignore_eos=True, logprobs=3, repetition_penalty=1.2)
        for i in range(8)
    ]
    expected = roomy.generate(prompts, [off(p) for p in params])
    inject(tight, oracle({r.prompt_ids: r.token_ids for r in expected}, spoilt(every)), 6)
    results = tight.generate(prompts, params)
    assert fingerprints(results) == fingerprints(expected)
    assert sum(r.receipt.preemptions for r in results) > 0
    assert drafted(results) > 0
    for bill in (r.receipt for r in results):
        assert bill.cached_tokens + bill.computed_tokens == bill.prompt_tokens
        assert sum(bill.sources.values()) == bill.output_tokens == 90
        assert min(bill.rejected.values(), default=0) >= 0
    check_idle(tight)


@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_a_step_with_few_rows(tiny_engine, chunk):
    """Drafts take only the rows that a step has left, and prompts that come later are served beside them."""
    engine = tiny_engine("llama", max_batch_tokens=chunk, prefix_cache=False)
    rng = random.Random(7)
    prompts = [random_prompt(rng, 30, VOCAB) for _ in range(4)]
    params = [SamplingParams(max_tokens=20, seed=i, temperature=1.0, ignore_eos=True, logprobs=2) for i in range(4)]
    expected, results = with_oracle(engine, prompts, params, 5, 64)
    assert fingerprints(results) == fingerprints(expected)
    check_idle(engine)


def test_a_draft_does_not_keep_a_prompt_waiting(tiny_engine):
    """A draft takes rows that nobody else wants."""
    engine = tiny_engine("llama", max_batch_tokens=16, prefix_cache=False)
    inject(engine, wrong(random.Random(8)), 64)
    first = engine.stream(random_prompt(random.Random(9), 8, VOCAB), SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(3):
        next(first)
    second = engine.stream(random_prompt(random.Random(10), 60, VOCAB), SamplingParams(max_tokens=1))
    for _ in range(6):  # 15 rows a step are free beside the first sequence
        next(first)
    second_delta = next(second)
    assert second_delta.token_ids
    assert second.result.receipt.forward_passes <= 5
    first.close()


def test_a_draft_does_not_cost_another_sequence_its_place(tiny_engine):
    """A draft takes blocks that nobody else wants, and gives back what it did not need: nobody is preempted because of it."""
    engine = tiny_engine("llama", blocks=7, max_batch_tokens=64, prefix_cache=False)
    prompts = [random_prompt(random.Random(s), 20, VOCAB) for s in range(2)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (50, 20)]  # five blocks, three of them beside three
    calm = engine.generate(prompts, [off(p) for p in params])
    assert sum(r.receipt.preemptions for r in calm) == 0
    inject(engine, wrong(random.Random(11)), 64)
    results = engine.generate(prompts, params)
    assert fingerprints(results) == fingerprints(calm)
    assert drafted(results) > 100
    assert sum(r.receipt.preemptions for r in results) == 0


@pytest.mark.parametrize(("arch", "blocks"), [("llama", 12), ("gemma3", 40)])
def test_random_requests_with_random_drafts_in_too_little_room(tiny_engine, arch, blocks):
    """Answers known and unknown to the drafters, of any length, beside prompts being scored; some are given up."""
    rng = random.Random(15)
    calm = tiny_engine(arch, prefix_cache=False)
    engine = tiny_engine(arch, blocks=blocks, max_batch_tokens=24, max_sequences=8)
    engine._controller.lengths = lambda step: [rng.choice([0, 1, 2, 5, 16, 64]) for _ in step.seqs]
    shared = random_prompt(rng, 40, VOCAB)
    requests = []
    for i in range(40):
        prompt = [*shared[: rng.randint(1, 40)], *random_prompt(rng, rng.randint(0, 30), VOCAB)]
        params = dataclasses.replace(random_params(rng, rng.randint(1, 60)), n=rng.choice([1, 1, 1, 2]))
        if i % 5 == 0:
            params = dataclasses.replace(params, prompt_logprobs=2)
        requests.append((prompt, params, rng.randint(0, 5) if rng.random() < 0.2 else None))
    expected = [calm.generate(prompt, off(params))[0] for prompt, params, _ in requests]
    for i, result in enumerate(expected):
        if i % 3:
            requests[i] = (requests[i][0], dataclasses.replace(requests[i][1], prediction=result.token_ids), requests[i][2])
    running = [
        (engine.stream(prompt, params), answer, patience)
        for (prompt, params, patience), answer in zip(requests, expected, strict=True)
    ]
    done = []
    while running:
        for stream, answer, patience in list(running):
            given_up = patience is not None and len(stream._live.deltas) > patience
            if given_up:
                stream.close()
            if given_up or stream.result is not None:
                running.remove((stream, answer, patience))
                done.append((stream.result, answer))
        engine._step()
        engine._scheduler.check()
    cancelled = 0
    for result, answer in done:
        for mine, right in zip(result.choices, answer.choices, strict=True):
            if mine.finish_reason is FinishReason.CANCELLED:
                cancelled += 1
                assert mine.token_ids == right.token_ids[: len(mine.token_ids)]
            else:
                assert fingerprint(mine) == fingerprint(right)
            assert sum(mine.receipt.sources.values()) == len(mine.token_ids)
        if all(c.finish_reason is not FinishReason.CANCELLED for c in result.choices):
            assert result.prompt_logprobs == answer.prompt_logprobs
    results = [result for result, _ in done]
    assert cancelled > 0
    assert rejected(results) > 100
    assert drafted(results) - rejected(results) > 100
    preemptions = sum(c.receipt.preemptions for r in results for c in r.choices)
    assert preemptions > 0 or arch == "gemma3"  # whose windows let go of blocks
    check_idle(engine)


def test_the_reference_kernels(tiny_engine):
    engine = tiny_engine("llama", kernels="reference", prefix_cache=False)
    prompts = [random_prompt(random.Random(s), 10, VOCAB) for s in range(2)]
    params = [SamplingParams(max_tokens=12, seed=s, temperature=float(s), logprobs=3, ignore_eos=True) for s in range(2)]
    expected, results = with_oracle(engine, prompts, params, 4, 5)
    assert fingerprints(results) == fingerprints(expected)
    assert rejected(results) > 0


# -- seeds -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_a_seeded_request_depends_on_nothing_else(tiny_engine, mode):
    """Alone, beside 1, 7 and 31 others without a seed, after a hit, as one of two, preempted: with drafts and without."""
    engine = tiny_engine("llama")
    engine._controller.lengths = always(6)
    rng = random.Random(12)
    prompt = random_prompt(rng, 30, VOCAB)
    params = SamplingParams(max_tokens=32, temperature=0.8, seed=42, ignore_eos=True, logprobs=3)
    (expected,) = tiny_engine("llama", prefix_cache=False).generate(prompt, off(params))
    mine = dataclasses.replace(params, speculate=mode)
    for neighbours in (0, 1, 7, 31):
        others = [random_prompt(rng, 20, VOCAB) for _ in range(neighbours)]
        loose = SamplingParams(max_tokens=20, temperature=1.0)
        result = engine.generate([prompt, *others], [mine, *[loose] * neighbours])[0]
        assert fingerprints([result]) == fingerprints([expected])
        assert result.receipt.cached_tokens == (16 if neighbours else 0)
    (two,) = engine.generate(prompt, dataclasses.replace(mine, n=2))
    assert fingerprints([two])[0][0] == fingerprints([expected])[0][0]
    tight = tiny_engine("llama", blocks=10)
    tight._controller.lengths = always(6)
    others = [random_prompt(rng, 20, VOCAB) for _ in range(2)]
    results = tight.generate([*others, prompt], [*[SamplingParams(max_tokens=90, ignore_eos=True)] * 2, mine])
    assert fingerprints(results[2:]) == fingerprints([expected])
    assert results[2].receipt.preemptions > 0
    assert drafted(results) > 0
    check_idle(engine)


def test_choices_with_drafts_equal_choices_without(tiny_engine):
    engine = tiny_engine("gemma3")
    engine._controller.lengths = always(5)
    prompt = random_prompt(random.Random(13), 37, VOCAB) * 2
    params = SamplingParams(n=6, seed=9, max_tokens=40, temperature=0.7, logprobs=4, ignore_eos=True)
    (expected,) = engine.generate(prompt, off(params))
    for _ in range(3):  # the memory fills with the very answers
        (result,) = engine.generate(prompt, params)
        assert fingerprints([result]) == fingerprints([expected])
    assert sum(c.receipt.sources["model"] for c in result.choices) < 6 * 40
    assert result.usage["completion_tokens"] == 240
    check_idle(engine)


# -- failures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_a_drafter_that_raises(tiny_engine, error):
    """Whoever makes the step sees the error, once; all answers go on to their right end, that one without drafts."""
    engine = tiny_engine("llama", max_batch_tokens=16)
    prompts = [random_prompt(random.Random(s), length, VOCAB) for s, length in enumerate((6, 7, 120))]
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2)
    expected = engine.generate(prompts, off(params))
    right = oracle({r.prompt_ids: r.token_ids for r in expected}, spoilt(0))(None)
    calls = itertools.count()

    def propose(seq, most):
        if seq.request.prompt_ids == expected[0].prompt_ids and next(calls) == 1:
            raise error("drafter")
        return right.propose(seq, most)

    inject(engine, lambda _: Says(propose), 3)
    streams = [engine.stream(p, params) for p in prompts]
    seen = 0
    while any(s.result is None for s in streams):
        try:
            engine._step()
        except error:
            seen += 1
            engine._scheduler.check()
    assert seen == 1
    assert fingerprints([s.result for s in streams]) == fingerprints(expected)
    for stream in streams:
        assert tuple(t for d in stream for t in d.token_ids) == stream.result.token_ids
    assert streams[0].result.receipt.sources["model"] > streams[1].result.receipt.sources["model"]
    for stream in streams:
        stream.close()
    assert fingerprints(engine.generate(prompts, params)) == fingerprints(expected)
    check_idle(engine)


def test_a_request_cancelled_while_it_drafts(tiny_engine):
    engine = tiny_engine("llama")
    prompt = random_prompt(random.Random(14), 20, VOCAB)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    (expected,) = engine.generate(prompt, off(params))
    inject(engine, oracle({expected.prompt_ids: expected.token_ids}, spoilt(4)), 9)
    for count in (1, 2, 4):
        stream = engine.stream(prompt, params)
        taken = [t for _ in range(count) for t in next(stream).token_ids]
        stream.cancel()
        assert [d.finish_reason for d in stream] == [FinishReason.CANCELLED]
        assert stream.result.token_ids == tuple(taken) == expected.token_ids[: len(taken)]
        bill = stream.result.receipt
        assert sum(bill.sources.values()) == bill.output_tokens == len(taken)
        check_idle(engine)


# -- the default model -----------------------------------------------------------------------------------------------------


def test_the_default_model(default_model_path):
    """A text to repeat with changes, one to go on with, and code: by cost and always, greedy and sampled, with penalties."""
    engine = Engine(default_model_path, prefix_cache=False, kv_device=200 << 20)
    source = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return width *"
    prompts = [
        [{"role": "user", "content": f"Repeat this code and rename width to w:\n{source} height * depth"}],
        source,
        "One two three four five six seven. One two three four",
    ]
    each = [
        SamplingParams(max_tokens=28, logprobs=3),
        SamplingParams(max_tokens=28, logprobs=3, temperature=0.7, top_p=0.9, seed=1),
        SamplingParams(max_tokens=28, logprobs=3, repetition_penalty=1.3, frequency_penalty=-1.0, seed=2),
    ]
    expected = engine.generate(prompts, [off(p) for p in each])
    seen: set[str] = set()
    wrong_drafts = 0
    for length in (None, 8):
        if length is not None:
            engine._controller.lengths = always(length)
        each[0] = dataclasses.replace(each[0], prediction=f"{source} height * depth".replace("width", "w"))
        results = engine.generate(prompts, each)
        assert fingerprints(results) == fingerprints(expected)
        seen |= {source for r in results for source in r.receipt.sources}
        wrong_drafts += rejected(results)
    assert seen >= {"model", "lookup", "memory"} or seen >= {"model", "prediction", "memory"}
    assert wrong_drafts > 0
    check_idle(engine)
    engine.close()
