"""Several tokens in one pass with a tokenizer: grammars, stop strings and forks in the middle of a pass, and masks in texts."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from exact.common import check_idle, fingerprints, random_params
from fakes.checkpoints import SPECIALS, random_weights, tiny_config, write_byte_tokenizer, write_hf
from obole import Engine, SamplingParams
from obole.bench.inside import always_drafting
from obole.config import BLOCK_SIZE, MultiToken
from obole.errors import ModelError
from obole.types import Grammar, Source

MASK, MARK = 260, "<|mtp|>"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GRAMMARS = [
    Grammar("regex", "[ab]{3,17}c?"),
    Grammar("regex", '("foo"|"bar"),[0-9]{5}(xyz)+'),
    Grammar("json_object"),
    Grammar("json_schema", '{"type": "object", "properties": {"alpha": {"enum": ["one", "two"]}}, "required": ["alpha"]}'),
]


def write(folder: Path, mask_id: int = MASK) -> Path:
    config = tiny_config("llama", vocab_size=261, bos_id=257, eos_ids=(259,), multi_token=MultiToken(mask_id, 6))
    write_hf(folder, config, random_weights(config))
    return write_byte_tokenizer(folder, specials=(*SPECIALS, MARK), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with Engine(str(write(tmp_path_factory.mktemp("text") / "model")), threads=1) as engine:
        yield engine


def random_request(rng: random.Random) -> SamplingParams:
    params = random_params(rng, rng.randrange(10, 60))
    more = {
        "n": rng.choice([1, 1, 3]),
        "min_tokens": rng.choice([0, 9]),
        "logit_bias": {rng.randrange(256): rng.choice([-50.0, 8.0])},
        "prompt_logprobs": rng.choice([None, 2]),
        "stop": rng.choice([(), ("a", "\n"), ("ab",)]),
        "grammar": rng.choice([None, *GRAMMARS]),
    }
    return dataclasses.replace(params, **more)


def lossy(rng: random.Random, params: SamplingParams) -> SamplingParams:
    mode = rng.choice([{"mtp": "static"}, {"mtp": "confadapt", "tau": rng.choice([0.01, 0.05])}])
    return dataclasses.replace(params, mtp_tokens=rng.choice([2, 4, None]), **mode)


def check_books(results) -> None:
    for receipt in (choice.receipt for result in results for choice in result.choices):
        assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens
        assert sum(receipt.sources.values()) == receipt.output_tokens
        for source, drafted in receipt.drafted.items():
            assert drafted == receipt.rejected[source] + receipt.sources.get(source, 0)
        unverified = receipt.sources.get(Source.MTP, 0) if receipt.acceptance == "lossy" else 0
        assert len(receipt.confidences) == unverified


def said(results):
    return fingerprints(results), [result.prompt_logprobs for result in results]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_asked_for(engine, seed):
    """Unverified: the same alone, together, cached and short of room, beside one that is cancelled. Verified: as without."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(rng.randrange(20, 70))]
    prompts = [shared[: rng.randrange(70)] + [rng.randrange(256) for _ in range(rng.randrange(1, 60))] for _ in range(8)]
    plain = [random_request(rng) for _ in prompts]
    params = [lossy(rng, p) for p in plain]
    alone = [engine.generate([p], q, tenant=f"{seed}.{i}")[0] for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    for _ in range(2):
        together = engine.generate(prompts, params)
        check_books(together)
        assert said(together) == said(alone)
    pool = 14 * BLOCK_SIZE * engine.info.kv_bytes_per_token
    with Engine(engine.info.model, threads=1, kv_device=pool, max_context=220, max_batch_tokens=31) as small:
        other = small.stream(prompts[0], dataclasses.replace(params[0], min_tokens=0, max_tokens=40))
        next(other)
        other.cancel()
        short = small.generate(prompts, params)
        check_books(short)
        assert said(short) == said(alone)
        check_idle(small)
    without = engine.generate(prompts, [dataclasses.replace(p, mtp="off", speculate="off") for p in plain])
    with always_drafting(engine, 9):
        verified = engine.generate(prompts, [dataclasses.replace(p, mtp="verify") for p in plain])
    check_books(verified)
    assert said(verified) == said(without)
    check_idle(engine)


def test_no_text_becomes_a_mask(engine):
    text = f"before {MARK} after"
    spelled = list(text.encode())
    for params in (SamplingParams(max_tokens=3, repetition_penalty=1.3), SamplingParams(max_tokens=3, mtp="static")):
        [raw] = engine.generate([f"<|im_start|>{text}"], params)
        assert list(raw.prompt_ids) == [258, *spelled]  # other control tokens are what they were
        [chat] = engine.generate([[{"role": "user", "content": text}]], params)
        assert MASK not in chat.prompt_ids
    assert list(engine.score([text])[0].token_ids) == spelled
    engine.generate([text], SamplingParams(max_tokens=3, prediction=MARK, stop=(MARK,)))


def test_a_mask_in_the_middle_of_the_vocabulary_is_refused(tmp_path):
    """Tokens beyond it, such as the end of the text, would never come."""
    with pytest.raises(ModelError, match=r"mask_token_id is 258, but the tokenizer has 261 tokens"):
        Engine(str(write(tmp_path / "model", 258)))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (7, "must be an object"),
        ({"max_tokens": 4}, "mask_token_id"),
        ({"mask_token_id": 261, "max_tokens": 4}, "the vocabulary has the ids 0 to 260"),
        ({"mask_token_id": 260, "max_tokens": 1}, "max_tokens"),
        ({"mask_token_id": 260, "max_tokens": 4, "adapter": 3}, "adapter must be an object"),
        ({"mask_token_id": 260, "max_tokens": 4, "adapter": {"file": "../a", "rank": 2, "alpha": 4}}, "is missing"),
        ({"mask_token_id": 260, "max_tokens": 4, "adapter": {"file": "a", "rank": 0, "alpha": 4}}, "rank"),
    ],
)
def test_contradictions_in_the_configuration(tmp_path, stated, message):
    folder = write(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"multi_token": stated}))
    with pytest.raises(ModelError, match=message):
        Engine(str(folder))
