"""Logits against transformers in fp32, on tiny random checkpoints of each architecture: max |difference| < 1e-3."""

from __future__ import annotations

import pytest
import torch
import transformers

from fakes.logits import all_logits
from obole import Engine

COMMON = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)

CASES = {
    "llama": (transformers.LlamaConfig, dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "llama, untied, wide heads": (transformers.LlamaConfig, dict(tie_word_embeddings=False, head_dim=32)),
    "llama, tied": (transformers.LlamaConfig, dict(tie_word_embeddings=True)),
    "llama, attention bias": (transformers.LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama, linear": (
        transformers.LlamaConfig,
        dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, max_position_embeddings=64),
    ),
    "llama, dynamic": (
        transformers.LlamaConfig,
        dict(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, max_position_embeddings=64),
    ),
    "llama, llama3": (
        transformers.LlamaConfig,
        dict(
            rope_parameters={
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500000.0,
            }
        ),
    ),
    "llama, yarn": (
        transformers.LlamaConfig,
        dict(
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        ),
    ),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=32)),
    "qwen2, sliding layers": (
        transformers.Qwen2Config,
        dict(
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=1,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
    ),
    "qwen3, sliding layers": (
        transformers.Qwen3Config,
        dict(
            head_dim=32,
            use_sliding_window=True,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "qwen2, sliding from a layer on": (
        transformers.Qwen2Config,
        dict(use_sliding_window=True, sliding_window=33, max_window_layers=2),
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        dict(
            num_hidden_layers=7,
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=40,
            layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_logits_agree(name, kernels, tmp_path):
    make, extra = CASES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**{**COMMON, **extra}), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # norms at exactly 1 and biases at 0 would hide mistakes
            parameter.normal_(0.0, 0.1 if "embed" in parameter_name else 0.2)
            if "norm" in parameter_name and not name.startswith("gemma3"):
                parameter.add_(1.0)
    model.save_pretrained(tmp_path)
    length = 240 if kernels == "native" else 100  # past the original RoPE length of 64, several sliding windows
    ids = torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    with Engine(tmp_path, kernels=kernels, max_context=length) as engine:
        got = all_logits(engine, ids.tolist())
    assert expected.abs().max() > 1
    for position in (0, length // 2, length - 1):
        assert (got[position] - expected[position]).abs().max() < 1e-3, position
    assert (got - expected).abs().max() < 1e-3
