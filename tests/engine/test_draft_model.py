"""A smaller model drafts: no answer changes, nothing is left behind, and its price is that of new tokens."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from exact.common import check_idle, fingerprints, random_prompt
from exact.test_recovery import failing
from fakes.checkpoints import Weights, random_weights, table_logits, tiny_config, write_hf, write_puppet
from fakes.engines import pool_bytes
from obole import Engine, SamplingParams
from obole.cache.managers import KVCacheManager
from obole.costmodel import StepCost
from obole.engine.draft_model import DraftModel
from obole.engine.runner import Runner
from obole.errors import ConfigError, InvalidRequest, ModelError
from obole.speculate.controller import Controller, always
from obole.types import FinishReason, Request, Sequence, StepPlan, StepResult

VOCAB = 128
SAME, NEARLY, OTHER = "same", "nearly", "other"
PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": dict(temperature=1.3, top_k=30, top_p=0.9, min_p=0.02),
    "penalised": dict(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "biased": dict(temperature=0.9, logit_bias={5: 4.0, 9: -100.0}, min_tokens=10, stop_token_ids=(7, 20)),
}

Opened = Callable[..., Engine]


def perturbed(weights: Weights, scale: float) -> Weights:
    rng = np.random.default_rng(9)
    return {name: w + rng.normal(0, scale, w.shape).astype(np.float32) for name, w in weights.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets by architecture; draft models that are nearly the target, and one that has nothing to do with it."""
    root, paths = tmp_path_factory.mktemp("drafting"), {}
    for arch, slips in (("llama", 0.002), ("gemma3", 0.01)):
        config = tiny_config(arch)
        weights = random_weights(config, seed=1, scale=0.25)
        paths[arch] = paths[f"{SAME} {arch}"] = write_hf(root / arch, config, weights)
        paths[f"{NEARLY} {arch}"] = write_hf(root / f"nearly-{arch}", config, perturbed(weights, slips))
    other = tiny_config("llama", num_layers=1)
    paths[OTHER] = write_hf(root / "other", other, random_weights(other, seed=5, scale=0.25))
    short = tiny_config("llama", max_position=48)
    paths["short"] = write_hf(root / "short", short, random_weights(tiny_config("llama"), seed=1, scale=0.25))
    return paths


@pytest.fixture
def drafting(folders: dict[str, Path]) -> Iterator[Opened]:
    """Opens engines that always draft with a model; each is closed, and then neither cache holds anything."""
    engines: list[Engine] = []

    def open_engine(draft: str = NEARLY, arch: str = "llama", *, length: int | None = 5, **settings: object) -> Engine:
        path = folders.get(f"{draft} {arch}") or folders[draft]
        engine = Engine(folders[arch], draft=str(path), **{"speculate": "draft", **settings})
        if length is not None:
            engine._controller.lengths = always(length)
        engines.append(engine)
        return engine

    yield open_engine
    for engine in engines:
        engine.close()
        check_idle(engine)
        check_forgotten(engine)


def model_of(engine: Engine) -> DraftModel:
    model = engine._controller.draft_model
    assert isinstance(model, DraftModel)
    return model


def check_forgotten(engine: Engine) -> None:
    model = model_of(engine)
    assert not model._shadows
    model.cache.check([])
    assert model.cache.usage().in_use == 0


def off(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, speculate="off")


def compared(engine: Engine, prompts, params: SamplingParams | list[SamplingParams]):
    """The results, after checking that they are those without drafts to the bit, and that nothing is held afterwards."""
    plain = [off(p) for p in params] if isinstance(params, list) else off(params)
    expected = engine.generate(prompts, plain)
    results = engine.generate(prompts, params)
    assert fingerprints(results) == fingerprints(expected)
    check_forgotten(engine)
    return results


def drafted(results) -> int:
    return sum(c.receipt.drafted.get("draft", 0) for r in results for c in r.choices)


def confirmed(results) -> int:
    return sum(c.receipt.sources.get("draft", 0) for r in results for c in r.choices)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("draft", [SAME, NEARLY, OTHER])
def test_answers_are_those_without(drafting, arch, draft):
    """Every way of choosing, alone and beside others, prompts longer than a step, n choices."""
    engine = drafting(draft, arch, max_batch_tokens=40)
    rng = random.Random(1)
    prompts = [random_prompt(rng, length, VOCAB) for length in (1, 16, 33, 100)]
    tried = right = 0
    for turn, chosen in enumerate(PARAMS.values()):
        params = SamplingParams(max_tokens=24, seed=turn, logprobs=1, **chosen)
        alone = compared(engine, prompts[turn % 4], dataclasses.replace(params, n=2))
        results = compared(engine, prompts, [dataclasses.replace(params, seed=i) for i in range(len(prompts))])
        whole = [r for r in (*alone, *results) if all(c.finish_reason is FinishReason.LENGTH for c in r.choices)]
        tried += drafted(whole)  # what was drafted beyond an end was not wrong
        right += confirmed(whole)
    assert tried > 150
    assert {SAME: right == tried, NEARLY: 0.3 < right / tried < 0.95, OTHER: 0 < right / tried < 0.2}[draft]
    for result in results:
        assert set(result.receipt.drafted) <= {"draft"}
        assert set(result.receipt.sources) <= {"draft", "model"}


def test_drafts_of_any_length_are_as_right(drafting):
    """The last token of a draft wholly right was never computed by the draft model, nor was what stood in for a wrong one."""
    for length in (1, 2, 3, 16, 64):
        engine = drafting(SAME, length=length)
        (result,) = compared(engine, [5, 6, 7], SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True))
        assert drafted([result]) == confirmed([result]) == 59 - -(-59 // (min(length, 16) + 1))


def test_the_model_drafts_where_nobody_else_can(drafting, folders):
    engine = drafting(SAME, speculate="auto")
    prompt = [5, 6, 7, 8] * 6
    params = SamplingParams(max_tokens=60, temperature=1.2, seed=2, ignore_eos=True, logprobs=2)
    expected = Engine(folders["llama"]).generate(prompt, off(params))
    (result,) = results = engine.generate(prompt, dataclasses.replace(params, prediction=tuple(expected[0].token_ids[:20])))
    assert fingerprints(results) == fingerprints(expected)
    assert result.receipt.sources["draft"] > 10
    assert result.receipt.sources["prediction"] > 10


def test_it_is_asked_where_that_pays(drafting):
    engine = drafting(SAME, length=None)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    engine._controller.cost.rows, engine._controller.cost.seconds = [1, 64], [1.0, 1.1]  # as of a large model
    model_of(engine).seconds_per_token = 1e-3
    assert confirmed(engine.generate([5, 6, 7], params)) > 30
    model_of(engine).seconds_per_token = 1e3
    assert drafted(engine.generate([5, 6, 7], params)) == 0


def test_a_model_that_was_wrong_is_asked_seldom_but_not_never(drafting, monkeypatch):
    engine = drafting(OTHER, length=None)
    cost = engine._controller.cost
    cost.rows, cost.seconds, cost.context_seconds, cost.read_seconds = [1, 64], [1.0, 2.0], 0.0, 0.0
    model_of(engine).seconds_per_token = 0.2
    monkeypatch.setattr(StepCost, "observe", lambda *_: None)
    monkeypatch.setattr("obole.engine.draft_model.GAIN", 0.0)
    tried = []
    for seed in range(6):
        params = SamplingParams(max_tokens=250, temperature=1.0, seed=seed, ignore_eos=True)
        (result,) = engine.generate([5 + seed], params)
        tried.append(1 - result.receipt.draftless_passes / result.receipt.forward_passes)
    assert sum(tried[:2]) > 0
    assert 0 < sum(tried[2:]) / 4 < 0.2


def test_unfilled_pools_and_evictions(drafting, folders):
    """A pool of its own that holds but few of the sequences: the others get no drafts, or lose their blocks, and no token."""
    for blocks in (8, 32):
        engine = drafting(SAME, kv_device=pool_bytes(folders["llama"], blocks), max_sequences=4)
        most = engine.max_context
        rng = random.Random(blocks)
        prompts = [random_prompt(rng, rng.randrange(1, most // 2), VOCAB) for _ in range(8)]
        params = [SamplingParams(max_tokens=most // 2 - 1, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)]
        results = compared(engine, prompts, params)
        assert model_of(engine).cache.usage().total == blocks // 4
        assert 0 < drafted(results) == confirmed(results)


@pytest.mark.parametrize(("arch", "blocks"), [("llama", None), ("llama", 20), ("gemma3", None), ("gemma3", 200)])
def test_drafts_are_what_the_model_would_write_by_itself(drafting, folders, monkeypatch, arch, blocks):
    """Whatever was rolled back, shared, evicted or let go of: the same noise, and so the same tokens."""
    settings = {} if blocks is None else {"kv_device": pool_bytes(folders[arch], blocks)}
    engine = drafting(NEARLY, arch, length=12, max_batch_tokens=20, **settings)
    said: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    propose = DraftModel.propose

    def recorded(self: DraftModel, seqs: list[Sequence], lengths: list[int]):
        proposals = propose(self, seqs, lengths)
        for seq, proposal in zip(seqs, proposals, strict=True):
            if proposal is not None:
                said[seq.seed, tuple(seq.tokens)] = list(proposal.tokens)
        return proposals

    monkeypatch.setattr(DraftModel, "propose", recorded)
    rng = random.Random(7)
    common = random_prompt(rng, 30, VOCAB)
    prompts = [common + random_prompt(rng, length, VOCAB) for length in (1, 3, 18, 40)]
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    compared(engine, prompts, params)
    alone = Engine(folders[f"{NEARLY} {arch}"], speculate="off")
    asked = [
        SamplingParams(max_tokens=len(drafts), temperature=1.0, seed=seed, ignore_eos=True)
        for (seed, _), drafts in said.items()
    ]
    written = alone.generate([list(tokens) for _, tokens in said], asked)
    assert [list(result.token_ids) for result in written] == list(said.values())
    assert len(said) >= 15


def test_preempted_sequences_go_on_with_their_shadows(drafting, folders):
    engine = drafting(SAME, kv_device=pool_bytes(folders["llama"], 12))
    rng = random.Random(3)
    prompts = [random_prompt(rng, 20, VOCAB) for _ in range(5)]
    params = [SamplingParams(max_tokens=50, temperature=1.0, seed=i, ignore_eos=True, logprobs=2) for i in range(5)]
    results = compared(engine, prompts, params)
    assert sum(r.receipt.preemptions for r in results) > 0
    assert 0 < drafted(results) == confirmed(results)


def test_the_draft_models_context_ends_first(drafting):
    engine = drafting("short")
    (result,) = compared(engine, [5] * 20, SamplingParams(max_tokens=100, ignore_eos=True))
    assert result.receipt.sources["draft"] == confirmed([result]) == drafted([result])
    assert 20 <= drafted([result]) <= 28
    (result,) = compared(engine, [5] * 60, SamplingParams(max_tokens=20, ignore_eos=True))
    assert drafted([result]) == 0


def test_windows_are_let_go_of(drafting, folders):
    """A model with windows of 16 tokens drafts along a sequence that its pool could not hold without them."""
    engine = drafting(SAME, "gemma3", kv_device=pool_bytes(folders["gemma3"], 140), max_batch_tokens=16)
    assert model_of(engine).cache.usage().total == 35 < 7 * 120 // 16
    results = compared(engine, random_prompt(random.Random(5), 120, VOCAB), SamplingParams(max_tokens=100, ignore_eos=True))
    assert drafted(results) == confirmed(results) == 99 - -(-99 // 6)


def computed_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The draft model's plans from now on."""
    plans: list[StepPlan] = []
    model, run = model_of(engine), Runner.run

    def recorded(self: Runner, plan: StepPlan) -> StepResult:
        if self is model.runner:
            plans.append(plan)
        return run(self, plan)

    monkeypatch.setattr(Runner, "run", recorded)
    return plans


def test_prompts_are_read_once(drafting, monkeypatch):
    """n choices share their prompt, and so does the next turn of a conversation what it goes on from."""
    engine = drafting(SAME, max_batch_tokens=64)
    plans = computed_rows(engine, monkeypatch)
    prompt = random_prompt(random.Random(6), 150, VOCAB)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    (first,) = engine.generate(prompt, dataclasses.replace(params, n=3))
    rows = sum(plan.total_rows for plan in plans)
    assert 150 + 3 * 15 < rows < 150 + 3 * 40
    plans.clear()
    engine.generate([*prompt, *first.token_ids, 9, 8, 7], params)
    assert sum(plan.total_rows for plan in plans) < 16 + 30
    plans.clear()
    engine.generate([*prompt, *first.token_ids, 9, 8, 7], params, tenant="another")
    assert sum(plan.total_rows for plan in plans) > 150


def test_the_price_is_that_of_new_tokens(drafting, monkeypatch):
    engine = drafting(SAME, max_batch_tokens=32)
    model, run, now = model_of(engine), Runner.run, 0.0
    model.seconds_per_token, model.clock = 0.1, lambda: now

    def slow(self: Runner, plan: StepPlan) -> StepResult:
        nonlocal now
        if self is model.runner:
            now += plan.total_rows
        return run(self, plan)

    monkeypatch.setattr(Runner, "run", slow)
    for seed in range(3):  # 200 rows of prompt before the first draft
        engine.generate(random_prompt(random.Random(seed), 200, VOCAB), SamplingParams(max_tokens=50, ignore_eos=True))
    assert 1 < model.seconds_per_token < 1.25  # where a draft was wholly right, the next one begins with two rows


def test_time_spent_drafting_is_not_saved(drafting, monkeypatch):
    engine = drafting(SAME)
    propose = DraftModel.propose

    def slow(self: DraftModel, seqs: list[Sequence], lengths: list[int]):
        time.sleep(0.02)
        return propose(self, seqs, lengths)

    monkeypatch.setattr(DraftModel, "propose", slow)
    (result,) = engine.generate([5, 6], SamplingParams(max_tokens=20, ignore_eos=True))
    assert result.receipt.draft_seconds > 0.06
    assert result.receipt.saved_seconds < -0.02


# -- what cannot be --------------------------------------------------------------------------------------------------------


def test_another_vocabulary_is_refused(folders, tmp_path):
    other = write_hf(tmp_path / "other", config := tiny_config("llama", vocab_size=120), random_weights(config))
    with pytest.raises(ConfigError, match=r"^draft: the tokens of .*other are not those .*120 and 128.* of the same family\.$"):
        Engine(folders["llama"], draft=str(other))
    table = table_logits([0] * 260)
    target, draft = write_puppet(tmp_path / "target.gguf", table), write_puppet(tmp_path / "draft", table)
    Engine(target, draft=str(draft)).close()  # the same tokenizer in another form
    text = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match="choose a smaller model of the same family"):
        Engine(target, draft=str(draft))


def test_no_model_no_drafts_of_it(folders):
    with pytest.raises(ConfigError, match="set draft to one"):
        Engine(folders["llama"], speculate="draft")
    with Engine(folders["llama"]) as engine, pytest.raises(InvalidRequest, match="no model that drafts"):
        engine.generate([5], SamplingParams(speculate="draft"))


# -- ends ------------------------------------------------------------------------------------------------------------------


def test_cancelled_requests_leave_nothing(drafting):
    engine = drafting(NEARLY)
    params = SamplingParams(max_tokens=100, ignore_eos=True, n=2)
    streams = [engine.stream([5, 6, 7 + i], params) for i in range(3)]
    for stream in streams:
        for _ in range(4):
            next(stream)
    assert len(model_of(engine)._shadows) == 6
    streams[0].close()
    assert len(model_of(engine)._shadows) == 4
    streams[1].cancel()
    for _ in range(8):
        next(streams[2])
    assert len(model_of(engine)._shadows) == 2
    del stream
    streams.clear()  # collected unread
    engine.generate([5], SamplingParams(max_tokens=1))
    check_forgotten(engine)


BOUNDARIES = [
    (KVCacheManager, "allocate"),
    (KVCacheManager, "attach"),
    (KVCacheManager, "commit"),
    (KVCacheManager, "release"),
    (Runner, "run"),
    (DraftModel, "propose"),
    (DraftModel, "forget"),
    (Controller, "draft"),
    (Controller, "observe"),
    (Controller, "finish"),
    (Engine, "_deliver"),
]


@pytest.mark.parametrize(("owner", "name"), BOUNDARIES)
@pytest.mark.parametrize(("error", "after"), [(KeyboardInterrupt, True), (MemoryError, False)])
def test_interrupted_anywhere(drafting, monkeypatch, owner, name, after, error):
    engine = drafting(NEARLY, kv_device=None)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=4, logprobs=1, ignore_eos=True, n=2)
    prompt = random_prompt(random.Random(1), 32, VOCAB)
    expected = engine.generate(prompt, off(params))
    function = getattr(owner, name)
    for call in (1, 2, 6, 15):
        stream = engine.stream(prompt, params)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing(function, call, after, error))
            try:
                for _ in stream:
                    pass
            except error:
                assert [d.finish_reason for d in stream][-1:] in ([FinishReason.CANCELLED], [FinishReason.LENGTH], [])
        assert not stream._live.unfinished
        check_forgotten(engine)
        assert fingerprints(engine.generate(prompt, params)) == fingerprints(expected)
        check_idle(engine)
        check_forgotten(engine)


@pytest.mark.parametrize("error", [ModelError, MemoryError, KeyboardInterrupt])
def test_a_draft_model_that_fails_ends_nothing_but_its_drafts(drafting, monkeypatch, error):
    """The error is seen once by who makes the step; those it was asked for go on without it, later ones with it."""
    engine = drafting(SAME)
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, n=2, temperature=1.0, seed=1)
    expected = engine.generate([[5, 6, 7], [8, 9]], off(params))
    monkeypatch.setattr(Runner, "run", failing(Runner.run, 12, False, error("no numbers")))
    streams = [engine.stream([5, 6, 7], params)]
    with pytest.raises(error):
        list(streams[0])
    streams.append(engine.stream([8, 9], params))
    for stream in streams:
        list(stream)
    results = [stream.result for stream in streams]
    assert fingerprints(results) == fingerprints(expected)
    assert drafted(results[:1]) < 25 < drafted(results[1:])


def test_a_shadow_follows_what_was_chosen():
    from obole.engine.draft_model import Shadow

    request = Request(id="a", prompt_ids=(1, 2, 3), params=SamplingParams(), seed=0)
    seq = Sequence(request, 0, 0, 100)
    shadow = Shadow(seq, 0, 100)
    shadow.follow(seq.tokens)
    assert (shadow.tokens, shadow.num_computed) == ([1, 2, 3], 0)
    for wrote, computed, chosen, kept in [
        ([4, 5, 6], 5, [4, 5, 6, 7], 5),  # all right: the last one was not computed
        ([8, 9], 8, [8, 1], 8),  # the second was wrong
        ([2, 3], 10, [], 8),  # the step did not come about
        ([2, 3], 10, [2, 3, 4, 5, 6], 10),  # others drafted more
        ([], 14, [7], 14),
    ]:
        shadow.tokens += wrote
        shadow.num_computed = computed
        seq.tokens += chosen
        shadow.follow(seq.tokens)
        assert shadow.tokens == seq.tokens
        assert shadow.num_computed == kept
