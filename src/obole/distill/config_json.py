"""`ModelConfig` -> the documents of a Hugging Face folder: what `weights/hf_config.py` reads, written.

In the spelling of transformers 4 (`rope_theta` and `rope_scaling`), which version 5 and other engines read as well.
"""

from __future__ import annotations

from typing import Any

import torch

from obole.config import ModelConfig, RopeConfig
from obole.errors import ModelError
from obole.layers.rope import rope_table
from obole.weights.hf_config import ACTIVATIONS, CLASSES, FULL, MODEL_TYPES, ROPE_FIELDS, SLIDING

LLAMA3_ORIGINAL = 8192  # positions that Llama 3.1 to 3.3 were first trained for, which GGUF files do not say


def config_document(config: ModelConfig) -> dict[str, Any]:
    """config.json, but for `multi_token` and the type of the weights.

    Raises `ModelError` for a position embedding that the format has no words for.
    """
    gemma = config.architecture == "gemma3"
    activation = next(name for name, own in ACTIVATIONS.items() if own == config.activation)
    document: dict[str, Any] = {
        "architectures": [next(name for name, own in CLASSES.items() if own == config.architecture)],
        "model_type": next(name for name, own in MODEL_TYPES.items() if own == config.architecture),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_activation" if gemma else "hidden_act": activation,
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling(config),
        **generation_document(config),
    }
    if config.architecture == "llama":
        document |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    if gemma:
        scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
        document |= {"query_pre_attn_scalar": _whole(scale**-2), "attn_logit_softcapping": config.attention_softcap}
    if config.sliding_layers:
        document |= {
            "sliding_window": config.sliding_window,
            "layer_types": [SLIDING if slides else FULL for slides in config.sliding_layers],
        }
        document |= {"rope_local_base_freq": _local_base(config)} if gemma else {"use_sliding_window": True}
    return document


def generation_document(config: ModelConfig) -> dict[str, Any]:
    """generation_config.json: the tokens that begin and end a text."""
    ends = list(config.eos_ids)
    return {"bos_token_id": config.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _scaling(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope if config.rope.freq_factors is None else _llama3(config)
    if rope.kind == "default":
        return None
    values = {name: getattr(rope, name) for name in sorted(ROPE_FIELDS[rope.kind])}
    values |= {"original_max_position_embeddings": rope.original_max_position}
    return {"rope_type": rope.kind} | {name: value for name, value in values.items() if value is not None}


def _llama3(config: ModelConfig) -> RopeConfig:
    """The parameters behind the divisors of frequencies that a GGUF file of Llama 3 holds in their place."""
    rope = config.rope
    assert rope.freq_factors is not None
    guess = RopeConfig(kind="llama3", theta=rope.theta, factor=max(rope.freq_factors), original_max_position=LLAMA3_ORIGINAL)
    # at the position 1 the angle is the frequency
    own, guessed = (
        rope_table(one, config.head_dim, config.max_position, config.max_position, 2).sin[1] for one in (rope, guess)
    )
    if rope.kind != "default" or not torch.allclose(own, guessed, rtol=1e-5, atol=0):
        raise ModelError(
            "The frequencies of this GGUF file's position embedding (rope_freqs) are not those of Llama 3, and config.json "
            "cannot state them: start from the model's Hugging Face folder."
        )
    return guess


def _local_base(config: ModelConfig) -> float:
    local = config.rope_local or RopeConfig()
    if local != RopeConfig(theta=local.theta):
        raise ModelError("The sliding-window layers have a scaled position embedding, which config.json cannot state here.")
    return local.theta


def _whole(value: float) -> float:
    """As a whole number where rounding is all that made it another."""
    return round(value) if abs(value - round(value)) < 1e-6 * value else value
