"""The tensors that a configuration calls for, by their canonical (Hugging Face) names, and where GGUF files keep them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn

from obole.config import ModelConfig
from obole.errors import ModelError
from obole.types import WeightTensor

# Constants and leftovers that old checkpoints carry: recomputed from the configuration.
IGNORED_HF = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.\w+")
IGNORED_GGUF = re.compile(r"(blk\.\d+\.)?(attn_rot_embd|rope_freqs)\.weight")

GGUF_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_LAYER_GEMMA = {
    **GGUF_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def canonical_name(gguf_name: str, architecture: str) -> str | None:
    """The Hugging Face name of a tensor of a GGUF file; None if no such tensor is known."""
    match = re.fullmatch(r"(?:blk\.(0|[1-9]\d{0,8})\.)?(\w+)\.(weight|bias)", gguf_name)
    if match is None:
        return None
    layer, stem, suffix = match.groups()
    if layer is None:
        name = GGUF_GLOBAL.get(stem)
        return None if name is None else f"{name}.{suffix}"
    name = (GGUF_LAYER_GEMMA if architecture == "gemma3" else GGUF_LAYER).get(stem)
    return None if name is None else f"model.layers.{layer}.{name}.{suffix}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, for every tensor of the model. Its size is that of `config.num_layers`: bound it first."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": ((queries, hidden), config.attention_bias),
        "self_attn.k_proj": ((keys, hidden), config.attention_bias),
        "self_attn.v_proj": ((keys, hidden), config.attention_bias),
        "self_attn.o_proj": ((hidden, queries), config.output_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (shape, bias) in matrices.items():
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.architecture == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes.update({f"{norm}.weight": (hidden,) for norm in norms})
    if config.qk_norm:
        shapes.update({"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)})
    return shapes


def check_tensors(config: ModelConfig, tensors: Mapping[str, WeightTensor], where: str) -> None:
    """Refuse a model with a tensor missing, too many, or of another shape than its configuration says."""

    def fail(message: str) -> NoReturn:
        raise ModelError(f"{where}: {message}.")

    if config.num_layers > len(tensors):  # before anything is made for each layer
        fail(f"the configuration has {config.num_layers} layers, but there are only {len(tensors)} tensors")
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            fail(f"tensor {name!r} of shape {shape} is missing")
        if tensors[name].shape != shape:
            fail(f"tensor {name!r} should have the shape {shape}, but has {tensors[name].shape}")
    extra = min(tensors.keys() - expected.keys(), default=None)
    if extra is not None:
        fail(f"tensor {extra!r} has no place in a {config.architecture} model with {config.num_layers} layers")
