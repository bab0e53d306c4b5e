"""The default model itself, on the native kernels: the same equalities, and its likelihood of real text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from exact.common import check_idle, fingerprints
from obole import Engine, SamplingParams
from obole.kernels.formats import dequantize
from obole.weights.checkpoint import open_checkpoint

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def text() -> str:
    return LICENCE.read_text()


@pytest.fixture
def open_default(default_model_path: Path) -> Iterator[object]:
    engines: list[Engine] = []

    def opened(**settings: object) -> Engine:
        engines.append(Engine(default_model_path, **settings))
        return engines[-1]

    yield opened
    for engine in engines:
        check_idle(engine)
        engine.close()


def params(seed: int, **more: object) -> SamplingParams:
    sampled = {"temperature": 0.9, "top_p": 0.95} if seed % 2 else {}
    return SamplingParams(**{"max_tokens": 24, "seed": seed, "logprobs": 5, "ignore_eos": True, **sampled, **more})


def test_alone_batched_chunked_cached(open_default, text):
    cold = open_default(prefix_cache=False)
    ids = cold.tokenizer.encode(text, special=False)
    rng = random.Random(30)
    prompts = [ids[start : start + rng.randint(1, 200)] for start in rng.sample(range(2000), 16)]
    each = [params(seed) for seed in range(16)]
    expected = fingerprints([cold.generate(p, q)[0] for p, q in zip(prompts, each, strict=True)])
    assert fingerprints(cold.generate(prompts, each)) == expected
    for chunk in (7, 16, 64):
        assert fingerprints(open_default(prefix_cache=False, max_batch_tokens=chunk).generate(prompts, each)) == expected
    warm = open_default()
    for prompt in prompts:  # fill the cache with prefixes that end anywhere
        warm.generate(prompt[: rng.randint(1, len(prompt))], SamplingParams(max_tokens=1))
    results = warm.generate(prompts, each)
    assert fingerprints(results) == expected
    assert sum(r.receipt.cached_tokens for r in results) > 100


def test_preempted_and_resumed(open_default, text):
    roomy = open_default(prefix_cache=False)
    ids = roomy.tokenizer.encode(text, special=False)
    prompts = [ids[start : start + 40] for start in range(0, 240, 40)]
    each = [params(seed, max_tokens=60, repetition_penalty=1.1) for seed in range(6)]
    expected = fingerprints([roomy.generate(p, q)[0] for p, q in zip(prompts, each, strict=True)])
    tight = open_default(kv_device=16 * 16 * roomy.info.kv_bytes_per_token)
    results = tight.generate(prompts, each)
    assert fingerprints(results) == expected
    assert sum(r.receipt.preemptions for r in results) > 0


def test_likelihood_within_one_per_cent_of_the_fp32_reference(open_default, default_model_path, text):
    engine = open_default()
    ids = engine.tokenizer.encode(text, special=False, bos=True)[:1000]
    assert len(ids) == 1000
    reference = float32_nll(default_model_path, ids)
    assert engine.score(ids)[0].nll == pytest.approx(reference, rel=0.01)


def float32_nll(path: Path, ids: list[int]) -> float:
    """Mean over all tokens but the first, by transformers' Llama in fp32 on the dequantised weights."""
    checkpoint = open_checkpoint(path)
    c = checkpoint.config
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=c.vocab_size,
                hidden_size=c.hidden_size,
                intermediate_size=c.intermediate_size,
                num_hidden_layers=c.num_layers,
                num_attention_heads=c.num_heads,
                num_key_value_heads=c.num_kv_heads,
                max_position_embeddings=c.max_position,
                rms_norm_eps=c.rms_eps,
                rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
                tie_word_embeddings=True,
            )
        )
    weights = {name: torch.from_numpy(dequantize(t).copy()).reshape(t.shape) for name, t in checkpoint.tensors.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids])).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))
