"""A checkpoint is the same whichever format it came in; what does not fit its configuration is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest

from obole.config import END_OF_TURN_TOKENS, ModelConfig, RopeConfig
from obole.errors import ModelError
from obole.kernels.formats import dequantize
from obole.text.gguf_tokenizer import tokenizer_from_gguf
from obole.weights.checkpoint import Checkpoint, open_checkpoint
from obole.weights.gguf import read_gguf
from obole.weights.verified import write_record
from tests.fakes import checkpoints as make
from tests.text.vocabularies import sentencepiece_metadata

YARN = RopeConfig(kind="yarn", factor=4.0, original_max_position=64)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in make.ARCHITECTURES},
    "llama tied": ("llama", {"tie_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True, "output_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope": RopeConfig(kind="linear", factor=4.0)}),
    "llama yarn": ("llama", {"rope": dataclasses.replace(YARN, attention_factor=1.25, beta_fast=16.0)}),
    "qwen2 one kv head": ("qwen2", {"num_kv_heads": 1, "num_heads": 8, "head_dim": 8}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 32, "rope": YARN}),
    "gemma3 other pattern": ("gemma3", {"num_layers": 3, "sliding_layers": (False, True, False)}),
    "gemma3 other scale": ("gemma3", {"attention_scale": 0.125, "rope_local": RopeConfig(theta=5000.0)}),
    "gemma3 62 layers": ("gemma3", {"num_layers": 62, "sliding_layers": tuple((i + 1) % 6 != 0 for i in range(62))}),
}


def variant(name: str) -> ModelConfig:
    arch, overrides = VARIANTS[name]
    return make.tiny_config(arch, **overrides)


def values(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: dequantize(tensor) for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_both_formats_are_one(name: str, tmp_path: Path) -> None:
    config = variant(name)
    weights = make.random_weights(config)
    folder = open_checkpoint(make.write_hf(tmp_path / "hf", config, weights, style=5))
    older = open_checkpoint(make.write_hf(tmp_path / "hf4", config, weights, style=4))
    file = open_checkpoint(make.write_gguf(tmp_path / "m.gguf", config, weights))
    if name == "gemma3 62 layers":  # 27B: the hidden size over the heads, which is 16 here too
        assert file.config.attention_scale == 0.25
    assert folder.config == older.config
    assert file.config == folder.config
    a, b = values(folder), values(file)
    assert a.keys() == b.keys() == make.expected_shapes(config).keys()
    plus = np.float32(1 if config.architecture == "gemma3" else 0)
    for key, value in a.items():
        np.testing.assert_array_equal(value, b[key], key)
        np.testing.assert_array_equal(value, weights[key] + (plus if "norm" in key else 0), key)
        assert folder.tensors[key].shape == file.tensors[key].shape == value.shape
    assert folder.gguf_metadata is None
    assert folder.folder == tmp_path / "hf"
    assert file.folder is None
    assert file.gguf_metadata is not None
    assert folder.nbytes == file.nbytes == sum(4 * v.size for v in a.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_configuration_is_the_one_written(name: str, tmp_path: Path) -> None:
    config = variant(name)
    read = open_checkpoint(make.write_hf(tmp_path / "hf", config, make.random_weights(config))).config
    if config.attention_scale is not None:
        assert read.attention_scale == pytest.approx(config.attention_scale, rel=1e-12)
        read = dataclasses.replace(read, attention_scale=config.attention_scale)
    assert read == config


def test_llama3_rope_becomes_factors_in_gguf(tmp_path: Path) -> None:
    """The documented difference: GGUF holds the divisors that follow from the parameters."""
    factors = tuple(float(x) for x in np.linspace(1, 8, 8, dtype=np.float32))
    config = make.tiny_config("llama", rope=RopeConfig(theta=5e5, freq_factors=factors))
    weights = make.random_weights(config)
    read = open_checkpoint(make.write_gguf(tmp_path / "m.gguf", config, weights))
    assert read.config == config
    assert "rope_freqs.weight" not in read.tensors
    llama3 = RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_position=64, high_freq_factor=4.0)
    config = make.tiny_config("llama", rope=llama3)
    assert open_checkpoint(make.write_hf(tmp_path / "hf", config, weights)).config.rope == llama3


@pytest.mark.parametrize("factors", [(1.0,) * 7, (0.0,) * 8, (float("nan"),) * 8, (-1.0,) * 8])
def test_wrong_rope_factors(tmp_path: Path, factors: tuple[float, ...]) -> None:
    config = make.tiny_config("llama", rope=RopeConfig(freq_factors=factors))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        open_checkpoint(make.write_gguf(tmp_path / "m.gguf", config, make.random_weights(config)))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("arch", make.ARCHITECTURES)
def test_half_precision_and_shards(arch: str, dtype: str, shards: int, tmp_path: Path) -> None:
    config = make.tiny_config(arch)
    weights = make.random_weights(config)
    read = open_checkpoint(make.write_hf(tmp_path, config, weights, dtype=dtype, shards=shards))
    for name, tensor in read.tensors.items():
        stored = make.as_stored(weights[name], dtype)
        rounded = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else stored.astype(np.float32)
        derived = arch == "gemma3" and "norm" in name
        assert tensor.kind == ("F32" if derived else dtype)
        np.testing.assert_array_equal(dequantize(tensor), rounded + np.float32(derived))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_rows_of_any_encoding_are_unpermuted(kind: str, tmp_path: Path) -> None:
    config = make.tiny_config("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    weights = make.random_weights(config)
    path = make.write_gguf(tmp_path / "m.gguf", config, weights, kind=kind)
    read = open_checkpoint(path)
    raw = read_gguf(path).tensors
    for part, heads in (("q", 4), ("k", 2)):
        stored = dequantize(raw[f"blk.1.attn_{part}.weight"])
        ours = read.tensors[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert ours.kind == kind
        assert not ours.data.flags.writeable
        np.testing.assert_array_equal(make.permuted(dequantize(ours), heads), stored)
    if kind in make.QUANTIZABLE:
        error = np.abs(dequantize(ours) - weights["model.layers.1.self_attn.k_proj.weight"]).max()
        assert error < 0.2


def test_kinds_may_differ_and_the_head_may_be_stored_apart(tmp_path: Path) -> None:
    config = make.tiny_config("qwen2")
    weights = make.random_weights(config)
    kinds = {"output.weight": "Q8_0", "blk.0.ffn_up.weight": "Q5_1"}
    read = open_checkpoint(make.write_gguf(tmp_path / "m.gguf", config, weights, kind="Q4_0", kinds=kinds))
    assert read.tensors["lm_head.weight"].kind == "Q8_0"
    assert read.tensors["model.layers.0.mlp.up_proj.weight"].kind == "Q5_1"
    assert read.tensors["model.layers.0.self_attn.q_proj.bias"].kind == "F32"


def drop(weights: make.Weights, name: str) -> make.Weights:
    return {key: value for key, value in weights.items() if key != name}


@pytest.mark.parametrize("arch", make.ARCHITECTURES)
@pytest.mark.parametrize("hf", [True, False])
def test_each_missing_tensor_is_named(arch: str, hf: bool, tmp_path: Path) -> None:
    config = make.tiny_config(arch, num_layers=1, **({"sliding_layers": (True,)} if arch == "gemma3" else {}))
    weights = make.random_weights(config)
    for i, name in enumerate(weights):
        less = drop(weights, name)
        if not hf and name == "lm_head.weight":
            continue  # a GGUF file without it is one with tied embeddings
        path = make.write_hf(tmp_path / str(i), config, less) if hf else make.write_gguf(tmp_path / f"{i}.gguf", config, less)
        with pytest.raises(ModelError) as caught:
            open_checkpoint(path)
        assert repr(name) in str(caught.value) or "'token_embd.weight'" in str(caught.value)
        assert "missing" in str(caught.value)


@pytest.mark.parametrize("hf", [True, False])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_wrong_shapes_are_named_with_both(name: str, hf: bool, tmp_path: Path) -> None:
    config = make.tiny_config("qwen3")
    weights = make.random_weights(config)
    wanted = weights[name].shape
    weights[name] = np.zeros((wanted[0] + 32, *wanted[1:]), np.float32)
    path = make.write_hf(tmp_path / "m", config, weights) if hf else make.write_gguf(tmp_path / "m.gguf", config, weights)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    for part in (repr(name), str(wanted), str(weights[name].shape)):
        assert part in str(caught.value)


def test_unknown_tensors_are_refused_and_leftovers_ignored(tmp_path: Path) -> None:
    config = make.tiny_config("llama")
    weights = make.random_weights(config)
    old = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert len(open_checkpoint(make.write_hf(tmp_path / "old", config, old)).tensors) == len(weights)
    for extra in ("model.layers.0.self_attn.q_norm.weight", "model.layers.2.input_layernorm.weight", "score.weight"):
        with pytest.raises(ModelError, match="has no place"):
            open_checkpoint(make.write_hf(tmp_path / extra, config, weights | {extra: np.ones(64, np.float32)}))
    qwen = make.tiny_config("qwen3")
    path = make.write_gguf(tmp_path / "m.gguf", qwen, make.random_weights(make.tiny_config("qwen3", attention_bias=True)))
    with pytest.raises(ModelError, match="bias' has no place in a qwen3 model"):
        open_checkpoint(path)


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    config = make.tiny_config("gemma3")
    weights = make.random_weights(config)
    same = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()}
    assert "lm_head.weight" not in open_checkpoint(make.write_hf(tmp_path / "same", config, same)).tensors
    same["lm_head.weight"][5, 5] += 1
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        open_checkpoint(make.write_hf(tmp_path / "other", config, same))


def test_layers_are_bounded_by_what_is_there(tmp_path: Path) -> None:
    config = make.tiny_config("llama")
    folder = make.write_hf(tmp_path, config, make.random_weights(config), extra={"num_hidden_layers": 2**31 - 1})
    with pytest.raises(ModelError, match="2147483647 layers, but there are only"):
        open_checkpoint(folder)


def test_vocabulary_and_embedding_must_agree_in_gguf(tmp_path: Path) -> None:
    config = make.tiny_config("llama", vocab_size=250)
    weights = make.random_weights(config)
    with pytest.raises(ModelError, match="250 rows, but the tokenizer has 260 tokens"):
        open_checkpoint(make.write_gguf(tmp_path / "a.gguf", config, weights, tokenizer=make.byte_tokenizer()))
    with pytest.raises(ModelError, match=r"250 rows, but llama\.vocab_size says 251"):
        open_checkpoint(make.write_gguf(tmp_path / "b.gguf", config, weights, extra={"llama.vocab_size": 251}))


def test_the_ends_of_a_turn_are_found_in_the_vocabulary(tmp_path: Path) -> None:
    config = make.tiny_config("llama", vocab_size=260, eos_ids=(257,))
    weights, tokenizer = make.random_weights(config), make.byte_tokenizer()
    read = open_checkpoint(make.write_gguf(tmp_path / "a.gguf", config, weights, tokenizer=tokenizer))
    assert read.config.eos_ids == (257, 259)
    plain = tokenizer | {"tokenizer.ggml.token_type": [1] * 260}  # text that looks like them is not meant
    read = open_checkpoint(make.write_gguf(tmp_path / "b.gguf", config, weights, tokenizer=plain))
    assert read.config.eos_ids == (257,)


@pytest.mark.parametrize("kind", [2, 3, 4])
@pytest.mark.parametrize("end", sorted(END_OF_TURN_TOKENS))
def test_every_end_of_a_turn_is_known_to_weights_and_text_alike(tmp_path: Path, end: str, kind: int) -> None:
    config = make.tiny_config("llama", vocab_size=261, eos_ids=(257,))
    words = [*make.byte_vocabulary(("<s>", "<|im_start|>", end)), "normal"]
    tokenizer = make.byte_tokenizer() | {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, kind, 1],
    }
    read = open_checkpoint(make.write_gguf(tmp_path / "a.gguf", config, make.random_weights(config), tokenizer=tokenizer))
    assert read.config.eos_ids == (257, 259)
    assert read.gguf_metadata is not None
    assert tokenizer_from_gguf(read.gguf_metadata).end_ids == {257, 259}


def test_a_sentencepiece_vocabulary_that_names_no_end_has_the_usual_one(tmp_path: Path) -> None:
    tokenizer = sentencepiece_metadata(size=300, eos_token_id=None, bos_token_id=None, unknown_token_id=None)
    config = make.tiny_config("llama", vocab_size=len(tokenizer["tokenizer.ggml.tokens"]), eos_ids=(), bos_id=None)
    read = open_checkpoint(make.write_gguf(tmp_path / "a.gguf", config, make.random_weights(config), tokenizer=tokenizer))
    assert read.config.eos_ids == (2,)
    assert tokenizer_from_gguf(tokenizer).end_ids == {2}


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    config = make.tiny_config("llama")
    weights = make.random_weights(config)
    path = make.write_gguf(tmp_path / "a.gguf", config, weights)
    assert open_checkpoint(path).digest == blake3.blake3(path.read_bytes()).digest()
    folder = make.write_hf(tmp_path / "hf", config, weights, shards=2)
    first = open_checkpoint(folder).digest
    assert len(first) == 32
    (tmp_path / "moved").mkdir()
    for file in folder.iterdir():
        (tmp_path / "moved" / file.name).write_bytes(file.read_bytes())
    assert open_checkpoint(tmp_path / "moved").digest == first
    weights["model.norm.weight"][3] += 1
    assert open_checkpoint(make.write_hf(tmp_path / "changed", config, weights, shards=2)).digest != first
    weights["model.norm.weight"][3] -= 1
    rope = dataclasses.replace(config, rope=RopeConfig(theta=20000.0))  # other positions, other keys
    assert open_checkpoint(make.write_hf(tmp_path / "rope", rope, weights, shards=2)).digest != first


def test_a_file_that_changed_after_it_was_verified(tmp_path: Path) -> None:
    config = make.tiny_config("llama")
    path = make.write_gguf(tmp_path / "a.gguf", config, make.random_weights(config))
    write_record(path)
    assert open_checkpoint(path).digest
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(ModelError, match="has changed since it was verified"):
        _ = open_checkpoint(path).digest


def test_puppet(tmp_path: Path) -> None:
    """Computed here in numpy: the logits after each token are those of the table."""
    table = make.chain([5, 9, 2, 200], 260, 259)
    logits = make.table_logits(table)
    for path in (tmp_path / "p.gguf", tmp_path / "p"):
        read = open_checkpoint(make.write_puppet(path, logits))
        assert read.config.eos_ids == (257, 259)
        assert read.config.bos_id is None
        weights = values(read)
        hidden = weights["model.embed_tokens.weight"]
        assert not weights["model.layers.0.self_attn.o_proj.weight"].any()
        assert not weights["model.layers.0.mlp.down_proj.weight"].any()
        hidden = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + read.config.rms_eps)
        np.testing.assert_allclose(hidden @ weights["lm_head.weight"].T, logits, rtol=1e-3)
    assert (tmp_path / "p" / "tokenizer.json").exists()


def test_the_puppet_takes_every_encoding(tmp_path: Path) -> None:
    config = make.puppet_config(260)
    weights = make.puppet_weights(config, make.table_logits([1] * 260))
    for kind in ("Q8_0", "Q4_K", "Q6_K"):
        assert open_checkpoint(make.write_gguf(tmp_path / f"{kind}.gguf", config, weights, kind=kind)).config == config


REAL = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": ("llama", 30, 49152, (0, 2), 96_576_768),
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": ("qwen2", 24, 151_936, (151_643, 151_645), 485_452_288),
    "gemma-3-270m-q4_k_m.gguf": ("gemma3", 18, 262_144, (1, 106), 246_587_904),
}


@pytest.mark.parametrize("file", REAL)
def test_real_models(file: str) -> None:
    path = Path.home() / ".cache" / "obole-models" / file
    if not path.exists():
        pytest.skip("a model for development that is not here")
    read = open_checkpoint(path)
    config = read.config
    assert (config.architecture, config.num_layers, config.vocab_size, config.eos_ids, read.nbytes) == REAL[file]
    norm = dequantize(read.tensors["model.norm.weight"])
    assert np.isfinite(norm).all()
    assert 0.1 < np.abs(norm).mean() < 100


def test_the_default_model(default_model_path: Path) -> None:
    read = open_checkpoint(default_model_path)
    assert read.config.architecture == "llama"
    assert read.digest.hex() == "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3"


def test_config_json_is_read_carefully(tmp_path: Path) -> None:
    config = make.tiny_config("llama")
    folder = make.write_hf(tmp_path, config, make.random_weights(config))
    for content in (
        "",
        "[]",
        "{",
        '{"a": 1, "a": 2}',
        "[" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ):
        (folder / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            open_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(make.hf_config(config)))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert open_checkpoint(folder).config.eos_ids == (2, 7, 9)
