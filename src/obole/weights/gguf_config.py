"""GGUF metadata -> `ModelConfig`.

Meanings and defaults are those of llama.cpp (llama-model.cpp, models/{llama,qwen2,qwen3,gemma3}.cpp) and its converters.
A key of the architecture that is not in the lists below is refused by name, since it may change what the model computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from obole.config import END_OF_TURN_TOKENS, ModelConfig, RopeConfig
from obole.errors import ModelError
from obole.kernels.formats import dequantize
from obole.types import WeightTensor
from obole.weights.fields import Fields, check_config, yarn_context
from obole.weights.gguf import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
ROPE_FREQS = "rope_freqs.weight"
KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.sliding_window_pattern", "attention.scale",
    "attention.causal", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.finetuned",
    "expert_count", "expert_used_count", "final_logit_softcapping", "attn_logit_softcapping",
    "tensor_data_layout", "attention.layer_norm_epsilon", "pooling_type", "use_parallel_residual",
}  # fmt: skip
# Values that say "nothing special here"; any other value of these keys is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "pooling_type": (0,),
    "use_parallel_residual": (False, True),  # of GPT-NeoX; without meaning here
}
PER_LAYER = {  # may be arrays
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.sliding_window_pattern",
}
ADDED_TYPES = (2, 3, 4)  # unknown, control, user-defined: tokens that are more than pieces of text
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED_KEYS = (*END_KEYS, "bos_token_id", "unknown_token_id")
SENTENCEPIECE_EOS = 2  # where a vocabulary of this kind names none


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Raises `ModelError`, naming file and key, for what is missing, contradictory or not supported."""
    where = str(file.path)
    arch = Fields(file.metadata, where).text("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"{where}: the architecture {arch!r} is not supported ({', '.join(ARCHITECTURES)} are).")
    fields = Fields(_own_fields(file, arch), where, f"{arch}.")
    _refuse_unsupported(file, fields)
    gemma = arch == "gemma3"
    hidden, heads = fields.integer("embedding_length"), _per_layer(fields, "attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            fields.fail(key, f"is {fields.values[key]}, but heads have the size {head_dim}; they must be equal")
    layers, max_position = fields.integer("block_count"), fields.integer("context_length")
    rope = _rope(fields, file.tensors.get(ROPE_FREQS) if arch == "llama" else None, max_position)
    window, sliding = _sliding(fields, gemma, layers, max_position)
    vocab = _vocab_size(file, fields)
    tokens = Fields(file.metadata, where)
    bos = tokens.token_ids("tokenizer.ggml.bos_token_id", vocab)
    bias = {part: f"blk.0.{part}.bias" in file.tensors for part in ("attn_q", "attn_output", "ffn_up")}
    return check_config(
        ModelConfig(
            architecture=arch,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=_per_layer(fields, "feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_per_layer(fields, "attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position=yarn_context(max_position, rope),
            rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            rope_local=RopeConfig(theta=fields.number("rope.freq_base_swa", 10000.0)) if sliding else None,
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias=arch == "qwen2" or (arch == "llama" and bias["attn_q"]),
            output_bias=arch == "llama" and bias["attn_output"],
            mlp_bias=arch == "llama" and bias["ffn_up"],
            qk_norm=arch in ("qwen3", "gemma3"),
            activation="gelu_tanh" if gemma else "silu",
            attention_scale=_attention_scale(fields, gemma, layers, hidden, heads, head_dim),
            embedding_scale=hidden**0.5 if gemma else 1.0,
            sliding_window=window if sliding else None,
            sliding_layers=sliding,
            bos_id=bos[0] if bos else None,
            eos_ids=_eos_ids(file, tokens, vocab),
        ),
        where,
    )


def _own_fields(file: GgufFile, arch: str) -> dict[str, Any]:
    """The architecture's keys without their prefix; float32 values as the shortest decimal number that rounds to them.

    So 1e-6, which the file holds as 9.99999997e-07, is again what the model's authors wrote.
    """
    fields: dict[str, Any] = {}
    for key, value in file.metadata.items():
        if key.startswith(arch + "."):
            fields[key.removeprefix(arch + ".")] = float(str(np.float32(value))) if type(value) is float else value
    return fields


def _refuse_unsupported(file: GgufFile, fields: Fields) -> None:
    split = file.metadata.get("split.count", 1)
    if split not in (0, 1):
        raise ModelError(
            f"{file.path}: the model is split over {split} files; join them first with `llama-gguf-split --merge`."
        )
    for key, value in fields.values.items():
        if key not in KNOWN:
            fields.fail(key, "is not known to obole, so the model may be of a kind it cannot compute")
        if isinstance(value, np.ndarray | list) and key not in PER_LAYER:
            fields.fail(key, "must be a single value, not an array")
        if key in NEUTRAL and value not in NEUTRAL[key]:
            fields.fail(key, f"is {str(value)[:40]}, which is not supported")


def _per_layer(fields: Fields, key: str, default: int | None = None) -> int:
    """A count that may be given once or for each layer; layers that differ are not supported."""
    value = fields.values.get(key)
    if not isinstance(value, np.ndarray):
        return fields.integer(key, default)
    if value.ndim != 1 or value.size == 0 or value.dtype.kind not in "iu" or (value != value[0]).any():
        fields.fail(key, "differs from layer to layer, which is not supported")
    return Fields({key: int(value[0])}, fields.where, fields.prefix).integer(key)


def _rope(fields: Fields, freqs: WeightTensor | None, max_position: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    factors = None
    if freqs is not None:
        values = dequantize(freqs).reshape(-1)
        if not (np.isfinite(values) & (values > 0)).all():
            raise ModelError(f"{fields.where}: tensor {ROPE_FREQS!r} must hold finite numbers above 0.")
        factors = tuple(values.tolist())
    given = {key: fields.values.get(key) for key in ("rope.scaling.factor", "rope.scale_linear")}
    factor = next((fields.number(key) for key, value in given.items() if value not in (None, 0.0, 0)), 1.0)
    kind = fields.text("rope.scaling.type", "linear")  # llama.cpp's default, without effect at a factor of 1
    if kind not in ("none", "linear", "yarn"):
        fields.fail("rope.scaling.type", f"is {kind!r}, which is not supported (none, linear, yarn are)")
    if kind == "none" or (kind == "linear" and factor == 1):
        return RopeConfig(theta=theta, freq_factors=factors)
    if factor < 1:
        fields.fail("rope.scaling.factor", f"is {factor}; it must be at least 1")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor, freq_factors=factors)
    log_multiplier = fields.values.get("rope.scaling.yarn_log_multiplier")
    has_mscale = log_multiplier not in (None, 0.0, 0)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=fields.integer("rope.scaling.original_context_length", max_position),
        attention_factor=fields.optional_number("rope.scaling.yarn_attn_factor"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        mscale=1.0 if has_mscale else None,
        mscale_all_dim=fields.number("rope.scaling.yarn_log_multiplier") if has_mscale else None,
        freq_factors=factors,
    )


def _sliding(fields: Fields, gemma: bool, layers: int, max_position: int) -> tuple[int | None, tuple[bool, ...]]:
    window = fields.optional_integer("attention.sliding_window", low=0)
    if not gemma:
        if window and window < max_position:
            fields.fail("attention.sliding_window", f"is {window}, which is supported for gemma3 only")
        return None, ()
    if not window:
        return None, ()
    pattern = fields.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):  # one truth value for each layer
        if pattern.ndim != 1 or pattern.size != layers or pattern.dtype.kind not in "biu":
            fields.fail("attention.sliding_window_pattern", f"must have one truth value for each of {layers} layers")
        sliding = tuple(bool(x) for x in pattern)
    else:
        every = fields.integer("attention.sliding_window_pattern", 6)
        sliding = tuple(i % every < every - 1 for i in range(min(layers, 1 << 16)))
    return window, sliding if any(sliding) else ()


def _attention_scale(fields: Fields, gemma: bool, layers: int, hidden: int, heads: int, head_dim: int) -> float | None:
    scale = fields.optional_number("attention.scale")
    if scale is not None or not gemma:
        return scale
    # Gemma 3 27B, known by its 62 layers, scales by the width of a head as if heads made up the hidden size
    return float((hidden / heads if layers == 62 else head_dim) ** -0.5)


def _vocab_size(file: GgufFile, fields: Fields) -> int:
    """Rows of the embedding, which must agree with the tokens in the metadata if there are any."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing.")
    rows = embedding.shape[0]
    stated = fields.integer("vocab_size", rows)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, list):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens must be an array of strings.")
    for what, count in (
        (f"{fields.prefix}vocab_size says", stated),
        ("the tokenizer has", rows if tokens is None else len(tokens)),
    ):
        if count != rows:
            raise ModelError(f"{file.path}: tensor 'token_embd.weight' has {rows} rows, but {what} {count} tokens.")
    return rows


def _eos_ids(file: GgufFile, fields: Fields, vocab: int) -> tuple[int, ...]:
    """The ends that the metadata name, and those known by their text among the tokens that are not mere text."""
    ids = {token for key in END_KEYS for token in fields.token_ids(f"tokenizer.ggml.{key}", vocab)}
    if file.metadata.get("tokenizer.ggml.model") == "llama" and "tokenizer.ggml.eos_token_id" not in file.metadata:
        ids.update(range(SENTENCEPIECE_EOS, min(vocab, SENTENCEPIECE_EOS + 1)))
    tokens, types = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if tokens is not None:
        added = {token for key in NAMED_KEYS for token in fields.token_ids(f"tokenizer.ggml.{key}", vocab)}
        if isinstance(types, np.ndarray) and len(types) == len(tokens):
            added.update(np.flatnonzero(np.isin(types, ADDED_TYPES)).tolist())
        ids.update(token for token in added if tokens[token] in END_OF_TURN_TOKENS)
    return tuple(sorted(ids))
