"""`config.json` of a Hugging Face checkpoint -> `ModelConfig`.

Both spellings of RoPE are read: `rope_theta` with `rope_scaling`, and the `rope_parameters` of transformers 5 (one
dictionary for each type of layer in gemma3). Defaults are those of the transformers configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from obole.config import ModelConfig, MultiToken, RopeConfig
from obole.weights.fields import Fields, check_config, yarn_context

CLASSES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}
ROPE_COMMON = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "finetuned"}


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """`generation` holds the fields of generation_config.json (may be empty); `where` names the folder in errors.

    Raises `ModelError`, naming the field, for what is missing, contradictory or not supported.
    """
    fields = Fields(config, f"{where}/config.json")
    arch = _architecture(fields)
    _refuse_unsupported(fields, arch)
    gemma = arch == "gemma3"
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, vocab = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    max_position = fields.integer("max_position_embeddings", 131072 if gemma else None)
    rope, rope_local = _ropes(fields, gemma, max_position)
    window, sliding = _sliding(fields, arch, layers)
    bias = arch == "qwen2" or fields.boolean("attention_bias", False)
    bos = fields.token_ids("bos_token_id", vocab)
    eos = fields.token_ids("eos_token_id", vocab)
    more_eos = Fields(generation, f"{where}/generation_config.json").token_ids("eos_token_id", vocab)
    return check_config(
        ModelConfig(
            architecture=arch,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", 4 if gemma else heads),
            head_dim=fields.integer("head_dim", {"gemma3": 256, "qwen3": 128}.get(arch, max(1, hidden // heads))),
            max_position=yarn_context(max_position, rope),
            rms_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            rope_local=rope_local if sliding else None,
            tie_embeddings=fields.boolean("tie_word_embeddings", gemma),
            attention_bias=bias,
            output_bias=bias and arch != "qwen2",
            mlp_bias=arch == "llama" and fields.boolean("mlp_bias", False),
            qk_norm=arch in ("qwen3", "gemma3"),
            activation=_activation(fields, gemma),
            attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5 if gemma else None,
            embedding_scale=hidden**0.5 if gemma else 1.0,
            sliding_window=window if sliding else None,
            sliding_layers=sliding,
            attention_softcap=fields.optional_number("attn_logit_softcapping") if gemma else None,
            bos_id=bos[0] if bos else None,
            eos_ids=tuple(sorted({*eos, *more_eos})),
            multi_token=_multi_token(fields, vocab),
        ),
        fields.where,
    )


def _multi_token(fields: Fields, vocab_size: int) -> MultiToken | None:
    """What `obole distill` says of a model that predicts several tokens in one pass."""
    stated = fields.values.get("multi_token")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        fields.fail("multi_token", "must be an object")
    inner = Fields(stated, fields.where, "multi_token.")
    mask_id, most = inner.integer("mask_token_id"), inner.integer("max_tokens", low=2)
    if mask_id >= vocab_size:
        inner.fail("mask_token_id", f"is {mask_id}, but the vocabulary has the ids 0 to {vocab_size - 1}")
    return MultiToken(mask_id, most)


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    if not names:  # as in a configuration written by hand
        name, known = fields.text("model_type"), MODEL_TYPES
    elif isinstance(names, list) and isinstance(names[0], str):
        name, known = names[0], CLASSES
    else:
        fields.fail("architectures", "must be a list of names")
    if name not in known:
        fields.fail("architectures" if names else "model_type", f"is {name!r}, which is not supported ({', '.join(known)} are)")
    arch, model_type = known[name], fields.text("model_type", None if not names else "")
    if model_type and MODEL_TYPES.get(model_type) != arch:
        fields.fail("model_type", f"is {model_type!r}, which does not fit the architecture {name!r}")
    return arch


def _refuse_unsupported(fields: Fields, arch: str) -> None:
    values = fields.values
    if values.get("quantization_config") is not None:
        method = values["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        fields.fail(
            "quantization_config", f"({str(name)[:40]!r}) is not supported; use a GGUF file or the unquantised checkpoint"
        )
    auto_map = values.get("auto_map")
    if isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map:
        fields.fail("auto_map", "asks for the model's own code, which obole does not run")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        fields.fail("partial_rotary_factor", f"is {values['partial_rotary_factor']!r}; only 1 is supported")
    if arch in ("qwen3", "gemma3") and fields.boolean("attention_bias", False):
        fields.fail("attention_bias", f"is not supported for {arch}")
    if arch != "llama" and fields.boolean("mlp_bias", False):
        fields.fail("mlp_bias", f"is not supported for {arch}")
    if fields.boolean("use_bidirectional_attention", False):
        fields.fail("use_bidirectional_attention", "is not supported: obole generates from left to right")
    if values.get("final_logit_softcapping") is not None:
        fields.fail("final_logit_softcapping", "is not supported")


def _activation(fields: Fields, gemma: bool) -> str:
    # gemma3 has both names; transformers reads hidden_activation
    key = "hidden_activation" if gemma else "hidden_act"
    name = fields.text(key, "gelu_pytorch_tanh" if gemma else "silu")
    if name not in ACTIVATIONS:
        fields.fail(key, f"is {name!r}, which is not supported ({', '.join(ACTIVATIONS)} are)")
    return ACTIVATIONS[name]


def _sliding(fields: Fields, arch: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window and, for each layer, whether it slides; an empty tuple if none does."""
    types = _layer_types(fields, layers)
    if arch == "llama":
        if any(types):
            fields.fail("layer_types", "has sliding-window layers, which are not supported for llama")
        return None, ()
    if arch == "gemma3":
        window = fields.integer("sliding_window", 4096)
        if not types:
            pattern = fields.optional_integer("sliding_window_pattern") or fields.integer("_sliding_window_pattern", 6)
            types = tuple((i + 1) % pattern != 0 for i in range(min(layers, 1 << 16)))
        return window, types if any(types) else ()
    if not fields.boolean("use_sliding_window", False) or fields.values.get("sliding_window") is None:
        if any(types):
            fields.fail("layer_types", "has sliding-window layers, but use_sliding_window is off")
        return None, ()
    window = fields.integer("sliding_window")
    if not types:
        first = fields.integer("max_window_layers", 28, low=0)
        types = tuple(i >= first for i in range(min(layers, 1 << 16)))
    return window, types if any(types) else ()


def _layer_types(fields: Fields, layers: int) -> tuple[bool, ...]:
    names = fields.values.get("layer_types")
    if names is None:
        return ()
    if not isinstance(names, list) or len(names) != layers:
        fields.fail("layer_types", f"must be a list with one name for each of {layers} layers")
    for name in names:
        if name not in (FULL, SLIDING):
            fields.fail("layer_types", f"has {str(name)[:40]!r}, which is not supported ({FULL}, {SLIDING} are)")
    return tuple(name == SLIDING for name in names)


def _ropes(fields: Fields, gemma: bool, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    parameters = _dictionary(fields, "rope_parameters")
    scaling = _dictionary(fields, "rope_scaling")
    if parameters and scaling:
        fields.fail("rope_scaling", "and rope_parameters are both given; keep one")
    where = Fields(parameters or scaling, fields.where, "rope_parameters." if parameters else "rope_scaling.")
    if not gemma:
        return _rope(where, fields.number("rope_theta", 10000.0), max_position), None
    theta, local = fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 10000.0)
    if not parameters:
        return _rope(where, theta, max_position), RopeConfig(theta=local)
    if not set(parameters) <= {FULL, SLIDING}:
        fields.fail("rope_parameters", f"must have one entry for {FULL} and one for {SLIDING}")
    nested = {key: Fields(_dictionary(where, key), fields.where, f"rope_parameters.{key}.") for key in (FULL, SLIDING)}
    return _rope(nested[FULL], theta, max_position), _rope(nested[SLIDING], local, max_position)


def _rope(fields: Fields, theta: float, max_position: int) -> RopeConfig:
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind not in ROPE_FIELDS:
        fields.fail("rope_type", f"is {kind!r}, which is not supported ({', '.join(ROPE_FIELDS)} are)")
    for key, value in fields.values.items():
        if value is not None and key not in ROPE_FIELDS[kind] | ROPE_COMMON:
            fields.fail(key, f"is not known for the rope_type {kind!r}")
    if fields.values.get("partial_rotary_factor") not in (None, 1, 1.0):
        fields.fail("partial_rotary_factor", f"is {fields.values['partial_rotary_factor']!r}; only 1 is supported")
    theta = fields.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    # transformers takes max_position_embeddings for "linear" and "dynamic" whatever else is written there
    original = fields.integer("original_max_position_embeddings", max_position) if kind in ("llama3", "yarn") else None
    factor = fields.optional_number("factor")
    if factor is None:
        factor = max_position / original if kind == "yarn" and original else fields.number("factor")
    if factor < 1:
        fields.fail("factor", f"is {factor}; it must be at least 1")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=fields.number("low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=fields.number("high_freq_factor") if kind == "llama3" else 4.0,
        attention_factor=fields.optional_number("attention_factor"),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        mscale=_mscale(fields, "mscale"),
        mscale_all_dim=_mscale(fields, "mscale_all_dim"),
        truncate=fields.boolean("truncate", True),
    )


def _mscale(fields: Fields, key: str) -> float | None:
    # 0 is written for "none"
    return None if fields.values.get(key) in (0, 0.0) else fields.optional_number(key)


def _dictionary(fields: Fields, key: str) -> Mapping[str, Any]:
    value = fields.values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        fields.fail(key, "must be a dictionary")
    return value
