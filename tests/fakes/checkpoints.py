"""Small checkpoints of every architecture, as Hugging Face folders and as GGUF files of the same weights.

`weights` are always what transformers would save: half-split RoPE, Gemma norms without the added one, float32. The GGUF
writer does to them what llama.cpp's converter does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from obole.config import ModelConfig, RopeConfig
from obole.weights.layout import GGUF_GLOBAL, GGUF_LAYER, GGUF_LAYER_GEMMA, expected_shapes

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
QUANTIZABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the others: `random_quantized`
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}

Weights = dict[str, np.ndarray]


def tiny_config(arch: str, **overrides: Any) -> ModelConfig:
    """Two layers (gemma3: seven, of which the sixth is full), 64 wide, 4 heads of 16, 2 KV heads, 128 tokens.

    The K-quants need rows of 256: hidden_size=256, intermediate_size=256, head_dim=64.
    """
    gemma, hidden = arch == "gemma3", overrides.get("hidden_size", 64)
    layers = overrides.get("num_layers", 7 if gemma else 2)
    head_dim = overrides.get("head_dim", 16)
    base: dict[str, Any] = dict(
        architecture=arch,
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=96,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        max_position=256,
        rms_eps=1e-6,
        rope=RopeConfig(theta=1e6 if gemma else 10000.0),
        tie_embeddings=gemma,
        attention_bias=arch == "qwen2",
        qk_norm=arch in ("qwen3", "gemma3"),
        bos_id=1,
        eos_ids=(2,),
    )
    if gemma:
        base |= dict(
            rope_local=RopeConfig(theta=10000.0),
            activation="gelu_tanh",
            attention_scale=head_dim**-0.5,
            embedding_scale=hidden**0.5,
            sliding_window=16,
            sliding_layers=tuple((i + 1) % 6 != 0 for i in range(layers)),
        )
    return ModelConfig(**{**base, **overrides})


def random_weights(config: ModelConfig, seed: int = 0, scale: float = 0.2) -> Weights:
    """Normal deviates of the given scale; norms around one (gemma3: around zero, one being added later)."""
    rng = np.random.default_rng(seed)
    offset = 0.0 if config.architecture == "gemma3" else 1.0
    return {
        name: (rng.normal(0, scale, shape) + (offset if "norm" in name else 0)).astype(np.float32)
        for name, shape in expected_shapes(config).items()
    }


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


def hf_config(config: ModelConfig, style: int = 5) -> dict[str, Any]:
    """config.json as transformers 5 writes it, or with the field names of version 4."""
    arch, gemma = config.architecture, config.architecture == "gemma3"
    result: dict[str, Any] = {
        "architectures": [f"{CLASSES[arch]}ForCausalLM"],
        "model_type": "gemma3_text" if gemma else arch,
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
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) != 1 else config.eos_ids[0],
        "hidden_activation" if gemma else "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
    }
    if arch == "llama":
        result |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    if gemma:
        assert config.attention_scale is not None
        result |= {"query_pre_attn_scalar": round(config.attention_scale**-2), "sliding_window": config.sliding_window}
    if config.multi_token is not None:
        result["multi_token"] = {"mask_token_id": config.multi_token.mask_id, "max_tokens": config.multi_token.most}
    if config.sliding_layers:
        result["layer_types"] = ["sliding_attention" if s else "full_attention" for s in config.sliding_layers]
        result |= {"sliding_window": config.sliding_window} | ({} if gemma else {"use_sliding_window": True})
    return result | (_rope_5(config) if style == 5 else _rope_4(config))


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    fields = {"factor": rope.factor, "original_max_position_embeddings": rope.original_max_position}
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"attention_factor": rope.attention_factor, "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return {} if rope.kind == "default" else {key: value for key, value in fields.items() if value is not None}


def _rope_5(config: ModelConfig) -> dict[str, Any]:
    def one(rope: RopeConfig) -> dict[str, Any]:
        return {"rope_type": rope.kind, "rope_theta": rope.theta, **_rope_fields(rope)}

    if config.architecture != "gemma3":
        return {"rope_parameters": one(config.rope)}
    local = config.rope_local or RopeConfig(theta=10000.0)
    return {"rope_parameters": {"full_attention": one(config.rope), "sliding_attention": one(local)}}


def _rope_4(config: ModelConfig) -> dict[str, Any]:
    fields = _rope_fields(config.rope)
    scaling = {"type": config.rope.kind, **fields} if fields else None
    local = {"rope_local_base_freq": config.rope_local.theta} if config.rope_local else {}
    return {"rope_theta": config.rope.theta, "rope_scaling": scaling, **local}


def as_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as the array that holds their bytes: float32, float16, or uint16 for BF16."""
    if dtype == "BF16":
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint16).reshape(values.shape)
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype])


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """(dtype, values as stored) by name, in the order given; the library has no numpy BF16."""
    header, offset = {}, 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for _, v in tensors.values()))


def write_hf(
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: str = "F32",
    shards: int = 1,
    style: int = 5,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """config.json (with the fields of `extra` on top) and one or several safetensors files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config, style) | dict(extra or {})))
    if shards == 1:
        if dtype == "BF16":
            write_safetensors(folder / "model.safetensors", {n: (dtype, as_stored(w, dtype)) for n, w in weights.items()})
        else:
            save_file({n: as_stored(w, dtype) for n, w in weights.items()}, folder / "model.safetensors")
        return folder
    names, weight_map = list(weights), {}
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        write_safetensors(folder / shard, {n: (dtype, as_stored(weights[n], dtype)) for n in part})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# --- GGUF files -------------------------------------------------------------------------------------------------------


def permuted(matrix: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows in which llama.cpp's converter stores the queries and keys of llama."""
    return matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(matrix.shape)


def gguf_name(name: str, architecture: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{next(k for k, v in GGUF_GLOBAL.items() if v == stem)}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    table = GGUF_LAYER_GEMMA if architecture == "gemma3" else GGUF_LAYER
    return f"blk.{layer}.{next(k for k, v in table.items() if v == rest)}.{suffix}"


def gguf_weights(config: ModelConfig, weights: Weights) -> Weights:
    """What the converter makes of the weights: its names, permuted rows, norms with their one."""
    result: Weights = {}
    for name, values in weights.items():
        if config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = permuted(values, config.num_heads if ".q_proj." in name else config.num_kv_heads)
        if config.architecture == "gemma3" and "norm" in name:
            values = values + np.float32(1)
        result[gguf_name(name, config.architecture)] = values
    return result


def random_quantized(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """Random blocks of any kind, uint8 (rows, bytes), whose scales keep the values within about one."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for place in places:
        scales = rng.uniform(-2e-3, 2e-3, blocks.shape[:2]).astype(np.float16) / (16 if "K" in kind else 1)
        blocks[:, :, place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Matrices as `kind` (or as `kinds` says, by GGUF name), vectors as F32.

    A kind that the `gguf` package cannot quantise to gets random blocks. `tokenizer`: as from `byte_tokenizer`; None
    leaves only the ids of the first and last tokens. `extra`: more metadata, by full key.
    """
    writer = gguf.GGUFWriter(path, config.architecture)
    _add_config(writer, config)
    for key, value in {**(tokenizer or {}), **(extra or {})}.items():
        _add(writer, key, value)
    rng = np.random.default_rng(1)
    for name, values in gguf_weights(config, weights).items():
        chosen = (kinds or {}).get(name, kind if values.ndim == 2 else "F32")
        quant = gguf.GGMLQuantizationType[chosen]
        if chosen in QUANTIZABLE:
            data = values if chosen == "F32" else gguf.quants.quantize(values, quant)
        else:
            data = random_quantized(rng, values.shape, chosen)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=quant)
    if config.rope.freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(config.rope.freq_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _add_config(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    gemma, rope = config.architecture == "gemma3", config.rope
    fields: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "rope.freq_base": rope.theta,
    }
    if config.sliding_window is not None:
        fields["attention.sliding_window"] = config.sliding_window
        if config.sliding_layers != tuple((i + 1) % 6 != 0 for i in range(config.num_layers)):
            fields["attention.sliding_window_pattern"] = list(config.sliding_layers)
    if gemma and config.attention_scale != config.head_dim**-0.5:
        fields["attention.scale"] = config.attention_scale
    if config.rope_local is not None and config.rope_local.theta != 10000.0:
        fields["rope.freq_base_swa"] = config.rope_local.theta
    if rope.kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        fields |= {
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
        if rope.attention_factor is not None:
            fields["rope.scaling.yarn_attn_factor"] = rope.attention_factor
    for key, value in fields.items():
        _add(writer, f"{config.architecture}.{key}", value)
    if config.bos_id is not None:
        writer.add_bos_token_id(config.bos_id)
    for key, token in zip(("eos", "eot", "eom"), config.eos_ids, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)


# --- a tokenizer of bytes ---------------------------------------------------------------------------------------------

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def byte_vocabulary(specials: Sequence[str] = SPECIALS) -> list[str]:
    """Token b is byte b; token 256 joins the bytes 0xFE and 0xFF, which no UTF-8 text has (a BPE needs a merge); then
    the special tokens."""
    characters = byte_characters()
    return [*characters, characters[0xFE] + characters[0xFF], *specials]


def byte_tokenizer(specials: Sequence[str] = SPECIALS, chat_template: str | None = None) -> dict[str, Any]:
    """GGUF metadata of the tokenizer, for `write_gguf`."""
    characters, tokens = byte_characters(), byte_vocabulary(specials)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3] * len(specials),
        "tokenizer.ggml.merges": [f"{characters[0xFE]} {characters[0xFF]}"],
        "tokenizer.ggml.add_bos_token": False,
    }
    return metadata | ({"tokenizer.chat_template": chat_template} if chat_template else {})


def write_byte_tokenizer(folder: Path, specials: Sequence[str] = SPECIALS, chat_template: str | None = None) -> Path:
    """The same tokenizer as tokenizer.json and tokenizer_config.json."""
    import tokenizers

    characters = byte_characters()
    vocabulary = {token: i for i, token in enumerate(byte_vocabulary(()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [(characters[0xFE], characters[0xFF])]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(s, special=True, normalized=False) for s in specials])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# --- the puppet model -------------------------------------------------------------------------------------------------


def puppet_config(vocab_size: int, **overrides: Any) -> ModelConfig:
    """One layer of llama, wide enough for one-hot embeddings; `hidden_size` is a multiple of 256 for every kind."""
    hidden = -(-vocab_size // 256) * 256
    settings: dict[str, Any] = dict(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=256,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        max_position=4096,
    )
    return tiny_config("llama", **{**settings, **overrides})


def puppet_weights(config: ModelConfig, logits: np.ndarray) -> Weights:
    """A model that ignores its context: after token t the logits are `logits[t]`, float32 (V, V), up to rounding.

    The residual stream is the one-hot embedding, since attention and MLP add nothing; the last norm makes it sqrt(hidden)
    high, which the head undoes.
    """
    weights = random_weights(config)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name][:] = 0
        if "norm" in name:
            weights[name][:] = 1
    weights["model.embed_tokens.weight"] = np.eye(config.vocab_size, config.hidden_size, dtype=np.float32)
    head = np.zeros((config.vocab_size, config.hidden_size), np.float32)
    head[:, : config.vocab_size] = logits.T / np.sqrt(config.hidden_size)
    weights["lm_head.weight"] = head
    return weights


def table_logits(table: Sequence[int], peak: float = 30.0) -> np.ndarray:
    """`table[t]` is the token after t, by `peak` over all others, which are at 0."""
    logits = np.zeros((len(table), len(table)), np.float32)
    logits[np.arange(len(table)), list(table)] = peak
    return logits


def chain(tokens: Sequence[int], vocab_size: int, end: int) -> list[int]:
    """A table that walks through `tokens` (each once) and from the last one, and from every other token, to `end`."""
    assert len(set(tokens)) == len(tokens)
    table = [end] * vocab_size
    for before, after in itertools.pairwise(tokens):
        table[before] = after
    return table


def write_puppet(path: Path, logits: np.ndarray, *, chat_template: str | None = None, **overrides: Any) -> Path:
    """A puppet as a `.gguf` file (matrices as F32), or else as a folder; with the byte tokenizer if the vocabulary is its.

    `overrides` are those of `puppet_config`. With the byte tokenizer, `<|endoftext|>` (257) and `<|im_end|>` (259) end a
    sequence, as a GGUF file's vocabulary says by itself, and there is no first token.
    """
    vocab_size = len(logits)
    tokens = byte_vocabulary()
    with_text = vocab_size == len(tokens)
    if with_text:
        overrides = {"bos_id": None, "eos_ids": (257, 259), **overrides}
    config = puppet_config(vocab_size, **overrides)
    weights = puppet_weights(config, logits)
    if path.suffix == ".gguf":
        return write_gguf(path, config, weights, tokenizer=byte_tokenizer(chat_template=chat_template) if with_text else None)
    if with_text:
        write_byte_tokenizer(path, chat_template=chat_template)
    return write_hf(path, config, weights)
