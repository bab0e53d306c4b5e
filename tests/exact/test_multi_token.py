"""Several tokens in one pass: confirmed, they change nothing; unverified, the text is a function of the request alone.

The weights are random, so predictions are mostly wrong: what is proved here are the books and the bits, not the gain. What a
pass predicts is computed by hand with an ordinary engine of the same weights, to which the mask is a token like any other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from exact.common import bits, check_idle, fingerprint, fingerprints, random_params, random_prompt
from fakes.checkpoints import random_weights, tiny_config, write_hf
from obole import Engine, SamplingParams
from obole.bench.inside import always_drafting
from obole.config import BLOCK_SIZE, MultiToken
from obole.errors import InvalidRequest
from obole.scheduler.loading import Loader
from obole.speculate.multi_token import MARGIN, RECENT, TAKEN
from obole.types import Source, Tier

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]
MASK = 120  # ids from here on are never chosen


def write(folder: Path, arch: str, most: int = 16) -> Path:
    config = tiny_config(arch, multi_token=MultiToken(MASK, most))
    weights = random_weights(config, seed=3)
    write_hf(folder, config, weights)
    return folder


def ordinary(folder: Path, to: Path) -> Path:
    """The same weights, without a word on several tokens."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["multi_token"]
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engines(request, tmp_path_factory):
    """One that predicts several tokens, and an ordinary one."""
    folder = write(tmp_path_factory.mktemp("mtp") / "model", request.param)
    plain = ordinary(folder, folder.parent / "plain")
    with Engine(str(folder), threads=2) as engine, Engine(str(plain), threads=2) as other:
        yield engine, other


def after(engine: Engine, tokens: list[int], params: SamplingParams):
    """What the model says after these tokens, masks among them; never a mask."""
    asked = dataclasses.replace(params, max_tokens=1, mtp=None, tau=None, mtp_tokens=None, logprobs=5, ignore_eos=True)
    banned = dict.fromkeys(range(MASK, 128), -100.0)
    [answer] = engine.generate([tokens], dataclasses.replace(asked, logit_bias=banned))
    return answer.choices[0].logprobs[0]


def by_hand(engine: Engine, prompt: list[int], params: SamplingParams):
    """Tokens and log-probabilities as the method says, one ordinary request for every row."""
    tokens, entries, passes = list(prompt), [], 0
    taken = TAKEN
    end = len(prompt) + params.max_tokens
    while len(tokens) < end:
        passes += 1
        first = after(engine, tokens, params)
        new = [first]
        if passes > 1:
            most = (params.mtp_tokens or 16) - 1
            masks = most if params.mtp == "static" else min(most, round(MARGIN * taken) + 2)
            masks = min(masks, end - 1 - len(tokens))
            threshold = 0.0 if params.mtp == "static" else params.tau
            for i in range(masks):
                if sure(new[-1]) < threshold:
                    break
                entry = after(engine, tokens + [MASK] * (i + 1), params)
                if sure(entry) < threshold:
                    break
                new.append(entry)
            if masks > 0:
                count = len(new) - 1
                taken += RECENT * (count * (MARGIN if count == masks else 1.0) - taken)
        tokens += [entry.token_id for entry in new]
        entries += new
    return entries, passes


def sure(entry) -> float:
    return math.exp(entry.logprob)


@pytest.mark.parametrize(
    "how",
    [{"mtp": "static", "mtp_tokens": 4}, {"mtp": "confadapt", "tau": 0.02}, {"mtp": "confadapt", "tau": 0.2}],
    ids=["static", "confadapt", "hardly"],
)
def test_unverified_text_is_what_the_method_says(engines, how):
    engine, other = engines
    rng = random.Random(5)
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=5, **how)
    for length in (1, 15, 33):
        prompt = random_prompt(rng, length, MASK)
        [answer] = engine.generate([prompt], params)
        entries, passes = by_hand(other, prompt, params)
        got = answer.choices[0].logprobs
        assert [e.token_id for e in got] == [e.token_id for e in entries]
        assert [bits(e.logprob) for e in got] == [bits(e.logprob) for e in entries]
        receipt = answer.receipt
        unverified = receipt.sources.get(Source.MTP, 0)
        assert unverified == len(receipt.confidences) == 20 - passes
        assert receipt.acceptance == ("lossy" if unverified else "exact")
        assert sum(receipt.sources.values()) == receipt.output_tokens == 20
        assert receipt.forward_passes == passes
        assert all(confidence >= (how.get("tau") or 0) for confidence in receipt.confidences)
    check_idle(engine)


def test_one_token_a_pass_is_greedy_decoding(engines):
    engine, _ = engines
    prompt = random_prompt(random.Random(1), 20, MASK)
    plain = SamplingParams(max_tokens=24, logprobs=5, mtp="off", speculate="off")
    [expected] = engine.generate([prompt], plain)
    for mode in ("static", "confadapt"):
        [answer] = engine.generate([prompt], dataclasses.replace(plain, mtp=mode, mtp_tokens=1))
        assert fingerprints([answer]) == fingerprints([expected])
        assert answer.receipt.acceptance == "exact"
    [never] = engine.generate([prompt], dataclasses.replace(plain, mtp="confadapt", tau=1.0))
    assert never.token_ids == expected.token_ids


def test_confirmed_predictions_change_nothing(engines):
    engine, _ = engines
    rng = random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(1, 60), MASK) for _ in range(12)]
    params = [dataclasses.replace(random_params(rng, rng.randrange(1, 40)), mtp="off", speculate="off") for _ in prompts]
    expected = engine.generate(prompts, params)
    with always_drafting(engine, 9):
        answers = engine.generate(prompts, [dataclasses.replace(p, mtp="verify", speculate=None) for p in params])
    assert fingerprints(answers) == fingerprints(expected)
    assert sum(r.receipt.drafted.get(Source.MTP, 0) for r in answers) > 0
    assert all(r.receipt.acceptance == "exact" for r in answers)
    check_idle(engine)


def lossy_params(rng: random.Random) -> SamplingParams:
    mode = rng.choice([{"mtp": "static"}, {"mtp": "confadapt", "tau": rng.choice([0.005, 0.02, 0.1])}])
    return dataclasses.replace(random_params(rng, rng.randrange(1, 50)), mtp_tokens=rng.choice([2, 5, 16]), **mode)


def test_unverified_text_does_not_depend_on_the_company(engines):
    """Alone = batched = chunked = cached, and others beside it are as they are without it."""
    engine, _ = engines
    rng = random.Random(7)
    prompts = [random_prompt(rng, rng.randrange(1, 80), MASK) for _ in range(12)]
    params = [lossy_params(rng) if i % 3 else random_params(rng, 30) for i in range(12)]
    alone = [engine.generate([p], q, tenant=str(i))[0] for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    assert fingerprints(engine.generate(prompts, params)) == fingerprints(alone)
    assert fingerprints(engine.generate(prompts, params)) == fingerprints(alone)  # prompts are cached now
    with Engine(str(engine.info.model), threads=1, max_batch_tokens=64, speculate="off") as chunked:
        assert fingerprints(chunked.generate(prompts, params)) == fingerprints(alone)
        check_idle(chunked)
    check_idle(engine)


def test_unverified_text_does_not_depend_on_preemption(engines):
    engine, _ = engines
    rng = random.Random(8)
    prompts = [random_prompt(rng, rng.randrange(1, 60), MASK) for _ in range(10)]
    params = [dataclasses.replace(lossy_params(rng), max_tokens=60, ignore_eos=True) for _ in prompts]
    alone = [engine.generate([p], q, tenant=str(i))[0] for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    block = engine.info.kv_bytes_per_token * BLOCK_SIZE
    with Engine(str(engine.info.model), threads=1, kv_device=9 * block, max_context=120) as small:
        together = small.generate(prompts, params)
        assert fingerprints(together) == fingerprints(alone)
        preempted = sum(result.receipt.preemptions for result in together)
        assert preempted > 0 or engine.info.architecture == "gemma3"  # whose windows pass by: it wants little
        check_idle(small)


def test_unverified_text_does_not_depend_on_lower_tiers(tmp_path, monkeypatch):
    """A preempted sequence whose blocks come up from RAM, a few steps later, has its masks when it runs again."""
    tries: dict[object, int] = {}

    def over(self, seq, now):
        tries[seq] = tries.get(seq, 0) + 1
        return tries[seq] % 3 == 0 and at_once(self, seq, now)

    at_once = Loader.over
    monkeypatch.setattr(Loader, "over", over)
    folder, loaded = write(tmp_path / "model", "llama"), 0
    with Engine(str(folder), threads=1) as roomy:
        block = roomy.info.kv_bytes_per_token * BLOCK_SIZE
        for seed in (2, 3):  # with which this mattered
            rng = random.Random(seed)
            prompts = [random_prompt(rng, rng.randrange(1, 60), MASK) for _ in range(10)]
            params = [dataclasses.replace(lossy_params(rng), max_tokens=60, ignore_eos=True) for _ in prompts]
            alone = [roomy.generate([p], q, tenant=str(i))[0] for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
            with Engine(str(folder), threads=1, kv_device=9 * block, kv_ram=64 << 20, max_context=120) as small:
                small._scheduler.loader.recompute = lambda start, end: 10.0 * max(0, end - start)
                assert fingerprints(small.generate(prompts, params)) == fingerprints(alone)
                loaded += small.tier_stats.tiers[Tier.RAM].blocks_read
                check_idle(small)
    assert loaded > 0


def test_what_is_cached_of_unverified_text_is_what_it_says(engines):
    """Blocks of an answer that was taken unverified hold its tokens computed as any others."""
    engine, _ = engines
    prompt = random_prompt(random.Random(3), 20, MASK)
    [first] = engine.generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True, mtp="static", mtp_tokens=7))
    longer = [*prompt, *first.token_ids]
    plain = SamplingParams(max_tokens=12, logprobs=5, speculate="off", mtp="off", ignore_eos=True)
    [cached] = engine.generate([longer], plain)
    assert cached.receipt.cached_tokens >= 64
    [cold] = engine.generate([longer], plain, tenant="another")
    assert fingerprint(cached.choices[0]) == fingerprint(cold.choices[0])


def test_streams_stops_and_limits(engines):
    engine, _ = engines
    prompt = random_prompt(random.Random(4), 9, MASK)
    params = SamplingParams(max_tokens=31, ignore_eos=True, mtp="static", mtp_tokens=8)
    [whole] = engine.generate([prompt], params)
    stream = engine.stream(prompt, params)
    deltas = list(stream)
    assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
    assert max(len(d.token_ids) for d in deltas) == 8
    assert sum((d.sources for d in deltas), ()).count(Source.MTP) == whole.receipt.sources[Source.MTP]
    stop = whole.token_ids[11]
    [ended] = engine.generate([prompt], dataclasses.replace(params, stop_token_ids=(stop,)))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    [short] = engine.generate([prompt], dataclasses.replace(params, max_tokens=3))
    assert len(short.token_ids) == 3
    check_idle(engine)


def test_what_cannot_be_done_is_refused(engines):
    engine, other = engines
    with pytest.raises(InvalidRequest, match="predicts one token at a time"):
        other.generate([[5, 6]], SamplingParams(mtp="confadapt"))
    with pytest.raises(InvalidRequest, match="predicts one token at a time"):
        other.generate([[5, 6]], SamplingParams(speculate="mtp"))
    with pytest.raises(InvalidRequest, match="With mtp confadapt, speculate must be"):
        SamplingParams(mtp="confadapt", speculate="lookup")
    with pytest.raises(InvalidRequest, match="mtp must be one of"):
        SamplingParams(mtp="fast")
    for wrong in ({"tau": 1.5, "mtp": "confadapt"}, {"tau": 0.9}, {"tau": 0.9, "mtp": "static"}):
        with pytest.raises(InvalidRequest, match="tau"):
            SamplingParams(**wrong)
    with pytest.raises(InvalidRequest, match="mtp_tokens is for mtp"):
        SamplingParams(mtp_tokens=4)
    with pytest.raises(InvalidRequest, match="taught at most 16 tokens"):
        engine.generate([[5, 6]], SamplingParams(mtp="static", mtp_tokens=17))
    with pytest.raises(InvalidRequest, match=f"{MASK}"):
        engine.generate([[5, MASK]], SamplingParams(max_tokens=1))
    other.generate([[5, 6]], SamplingParams(mtp="off", max_tokens=1))
