"""Configurations of both formats: what transformers writes is read as it means it; what is not supported is refused by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from obole.config import ModelConfig, RopeConfig
from obole.errors import ModelError
from obole.layers.rope import context_limit, rope_table
from obole.weights.checkpoint import open_checkpoint
from obole.weights.fields import LARGEST, SMALLEST
from obole.weights.gguf import GgufFile, read_gguf
from obole.weights.gguf_config import config_from_gguf
from obole.weights.hf_config import ROPE_FIELDS, config_from_hf
from tests.fakes import checkpoints as make


def read(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return config_from_hf(config, generation or {}, "m")


def hf(arch: str = "llama", **fields: Any) -> dict[str, Any]:
    return make.hf_config(make.tiny_config(arch)) | fields


SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields", "wanted"),
    [
        ("Llama", {}, {"architecture": "llama", "head_dim": 8, "bos_id": 1, "eos_ids": (2,)}),
        (
            "Llama",
            {"rope_parameters": LLAMA3, "head_dim": 12, "attention_bias": True, "mlp_bias": True},
            {
                "rope": RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_position=64),
                "head_dim": 12,
                "attention_bias": True,
                "output_bias": True,
                "mlp_bias": True,
            },
        ),
        ("Qwen2", {"tie_word_embeddings": True}, {"attention_bias": True, "output_bias": False, "tie_embeddings": True}),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
            {"sliding_window": 16, "sliding_layers": (False,) * 3 + (True,) * 4},
        ),
        ("Qwen2", {"sliding_window": 16}, {"sliding_window": None, "sliding_layers": ()}),
        ("Qwen3", {"head_dim": 16}, {"qk_norm": True, "attention_bias": False, "head_dim": 16}),
        (
            "Gemma3",
            {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 64},
            {
                "sliding_window": 16,
                "sliding_layers": (True,) * 5 + (False, True),
                "attention_scale": 0.125,
                "embedding_scale": 32**0.5,
                "activation": "gelu_tanh",
                "rope": RopeConfig(theta=1e6),
                "rope_local": RopeConfig(theta=1e4),
                "tie_embeddings": True,
                "eos_ids": (1,),
            },
        ),
    ],
)
def test_what_transformers_saves(name: str, fields: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**SMALL, **fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert {key: getattr(checkpoint.config, key) for key in wanted} == wanted
    saved = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert {n: t.shape for n, t in checkpoint.tensors.items()} == {n: p.shape for n, p in saved.items()}


GEMMA_270M = {  # as published, in the style of transformers 4
    "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640, "initializer_range": 0.02, "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "torch_dtype": "bfloat16",
    "use_bidirectional_attention": False, "use_cache": True, "vocab_size": 262144,
}  # fmt: skip


def test_a_published_gemma_and_its_gguf_agree() -> None:
    config = read(GEMMA_270M, {"eos_token_id": [1, 106]})
    assert config.tie_embeddings
    assert config.sliding_layers == ((True,) * 5 + (False,)) * 3
    assert (config.rope.theta, config.rope_local) == (1e6, RopeConfig(theta=1e4))
    path = Path.home() / ".cache" / "obole-models" / "gemma-3-270m-q4_k_m.gguf"
    if path.exists():
        assert open_checkpoint(path).config == config


def test_older_names_and_defaults() -> None:
    old = hf() | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    del old["rope_parameters"], old["head_dim"], old["num_key_value_heads"]
    config = read(old)
    assert config.rope == RopeConfig(kind="linear", theta=5e5, factor=2.0)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    gemma = hf("gemma3", sliding_window_pattern=3)
    del gemma["layer_types"]
    assert read(gemma).sliding_layers == (True, True, False, True, True, False, True)
    assert read(gemma | {"sliding_window_pattern": 1}).rope_local is None
    assert read(gemma | {"sliding_window_pattern": 1}).sliding_window is None


def test_yarn_extends_the_context() -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read(hf("qwen2", max_position_embeddings=32768, rope_parameters=scaling)).max_position == 131072
    assert read(hf("qwen2", max_position_embeddings=131072, rope_parameters=scaling)).max_position == 131072
    derived = read(hf("qwen2", max_position_embeddings=131072, rope_parameters=scaling | {"factor": None}))
    assert derived.rope.factor == 4.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (hf(architectures=["MistralForCausalLM"]), "MistralForCausalLM"),
    "multimodal": (hf(architectures=["Gemma3ForConditionalGeneration"]), "Gemma3ForConditionalGeneration"),
    "architectures": (hf(architectures="LlamaForCausalLM"), "architectures must be a list"),
    "model type": (hf(architectures=None, model_type="mamba"), "model_type is 'mamba'"),
    "contradiction": (hf(model_type="qwen2"), "does not fit"),
    "quantised": (hf(quantization_config={"quant_method": "awq"}), "quantization_config ('awq')"),
    "own code": (hf(auto_map={"AutoModelForCausalLM": "x.Y"}), "auto_map"),
    "activation": (hf(hidden_act="relu"), "hidden_act is 'relu'"),
    "gemma activation": (hf("gemma3", hidden_activation="gelu"), "hidden_activation is 'gelu'"),
    "rope type": (hf(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "rope_type is 'longrope'"),
    "rope field": (hf(rope_parameters={"rope_type": "default", "mrope_section": [1]}), "mrope_section"),
    "rope factor": (hf(rope_parameters={"rope_type": "linear", "factor": 0.5}), "factor is 0.5"),
    "rope without factor": (hf(rope_parameters={"rope_type": "linear"}), "factor is missing"),
    "rope theta": (hf(rope_parameters={"rope_type": "default", "rope_theta": float("nan")}), "rope_theta must be"),
    "rope twice": (hf(rope_scaling={"type": "linear", "factor": 2.0}), "both given"),
    "rope no dictionary": (hf(rope_parameters=[1]), "rope_parameters must be a dictionary"),
    "partial rope": (hf(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "partial rope inside": (hf(rope_parameters={"partial_rotary_factor": 0.5}), "rope_parameters.partial_rotary_factor"),
    "llama3 bounds": (hf(rope_parameters=LLAMA3 | {"high_freq_factor": 1.0}), "high_freq_factor"),
    "gemma flat rope": (hf("gemma3", rope_parameters={"rope_type": "default"}), "one entry for full_attention"),
    "bias qwen3": (hf("qwen3", attention_bias=True), "attention_bias is not supported for qwen3"),
    "bias gemma3": (hf("gemma3", attention_bias=True), "attention_bias is not supported for gemma3"),
    "mlp bias": (hf("qwen2", mlp_bias=True), "mlp_bias is not supported"),
    "bidirectional": (hf("gemma3", use_bidirectional_attention=True), "use_bidirectional_attention"),
    "softcap": (hf("gemma3", final_logit_softcapping=30.0), "final_logit_softcapping"),
    "layer types": (hf("qwen3", layer_types=["full_attention", "chunked_attention"]), "'chunked_attention'"),
    "too few layer types": (hf("gemma3", layer_types=["full_attention"]), "layer_types must be a list"),
    "sliding llama": (hf(layer_types=["full_attention", "sliding_attention"]), "not supported for llama"),
    "sliding but off": (hf("qwen2", layer_types=["full_attention", "sliding_attention"]), "use_sliding_window is off"),
    "heads": (hf(num_attention_heads=3), "cannot share 2 key-value heads"),
    "odd heads": (hf(head_dim=15), "must be even"),
    "eos": (hf(eos_token_id=128), "eos_token_id is 128"),
    "eos list": (hf(eos_token_id=[1, -1]), "eos_token_id"),
    "truth as number": (hf(vocab_size=True), "vocab_size must be a whole number"),
    "text as number": (hf(hidden_size="64"), "hidden_size must be a whole number"),
    "huge": (hf(hidden_size=2**40), "hidden_size must be"),
    "negative": (hf(num_hidden_layers=-1), "num_hidden_layers must be"),
    "epsilon": (hf(rms_norm_eps=0), "rms_norm_eps must be"),
    "tiny": (hf(rms_norm_eps=1e-320), "rms_norm_eps must be a number from 1e-30 to 1e+30"),
    "infinite": (hf(rms_norm_eps=float("inf")), "rms_norm_eps must be"),
    "truth": (hf(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        read(json.loads(json.dumps(config)))
    assert str(caught.value).startswith("m/config.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("theta", [1e-30, 1.0000000000000002, 1e4, 1e30])
@pytest.mark.parametrize("kind", ROPE_FIELDS)
def test_extreme_numbers_make_a_table_or_are_refused(kind: str, theta: float) -> None:
    names = sorted(ROPE_FIELDS[kind] - {"truncate"})
    for values in itertools.product((SMALLEST, 1.0, LARGEST), repeat=len(names)):
        rope = {"rope_type": kind, "rope_theta": theta, **dict(zip(names, values, strict=True))}
        try:
            config = read(hf(rope_parameters=rope, max_position_embeddings=2**31 - 1))
        except ModelError:
            continue
        assert rope_table(config.rope, config.head_dim, config.max_position, context_limit(config), 1).cos.shape == (1, 8)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads"])
def test_missing_fields_are_named(key: str) -> None:
    config = hf()
    del config[key]
    with pytest.raises(ModelError, match=f"{key} is missing"):
        read(config)


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    config = make.tiny_config("llama")
    return read_gguf(make.write_gguf(tmp_path_factory.mktemp("g") / "m.gguf", config, make.random_weights(config)))


def changed(file: GgufFile, **fields: Any) -> GgufFile:
    own = {"architecture": "general.architecture", "split": "split.count"}
    extra = {own.get(key, f"llama.{key.replace('__', '.')}"): value for key, value in fields.items()}
    return GgufFile({k: v for k, v in {**file.metadata, **extra}.items() if v is not None}, file.tensors, file.path)


def test_optional_gguf_fields(plain: GgufFile) -> None:
    config = config_from_gguf(changed(plain, attention__head_count_kv=None, attention__key_length=None, rope__freq_base=None))
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10000.0)
    same = config_from_gguf(changed(plain, attention__head_count=np.array([4, 4], np.int32)))
    assert same == config_from_gguf(plain)
    assert config_from_gguf(changed(plain, rope__scaling__type="none", rope__scaling__factor=4.0)).rope == RopeConfig()
    assert config_from_gguf(changed(plain, rope__scale_linear=4.0)).rope == RopeConfig(kind="linear", factor=4.0)
    assert config_from_gguf(changed(plain, rope__scaling__factor=0.0)).rope == RopeConfig()
    yarn = changed(plain, rope__scaling__type="yarn", rope__scaling__factor=2.0, rope__scaling__yarn_log_multiplier=0.5)
    read = config_from_gguf(yarn)
    assert read.rope == RopeConfig(kind="yarn", factor=2.0, original_max_position=256, mscale=1.0, mscale_all_dim=0.5)
    assert read.max_position == 512
    assert config_from_gguf(changed(plain, attention__sliding_window=256)).sliding_window is None


GGUF_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "mamba"}, "'mamba' is not supported"),
    "no architecture": ({"architecture": None}, "general.architecture is missing"),
    "architecture of another type": ({"architecture": 3}, "general.architecture must be text"),
    "unknown key": ({"logit_scale": 2.0}, "llama.logit_scale is not known"),
    "experts": ({"expert_count": 8}, "llama.expert_count is 8"),
    "split": ({"split": 3}, "split over 3 files"),
    "long rope": ({"rope__scaling__type": "longrope"}, "'longrope'"),
    "partial rope": ({"rope__dimension_count": 8}, "rope.dimension_count is 8"),
    "values of another size": ({"attention__value_length": 32}, "attention.value_length is 32"),
    "layers that differ": ({"attention__head_count_kv": np.array([2, 4], np.int32)}, "differs from layer to layer"),
    "empty array": ({"attention__head_count": np.array([], np.int32)}, "differs"),
    "array for a value": ({"block_count": np.array([2, 2], np.int32)}, "single value"),
    "words for a value": ({"expert_count": ["a"]}, "single value"),
    "window": ({"attention__sliding_window": 16}, "supported for gemma3 only"),
    "not causal": ({"attention__causal": False}, "attention.causal is False"),
    "scaled frequencies": ({"rope__scaling__attn_factor": 1.5}, "attn_factor"),
    "no layers": ({"block_count": 0}, "block_count must be"),
    "text": ({"context_length": "8"}, "context_length must be"),
    "no epsilon": ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "nan": ({"rope__freq_base": float("nan")}, "rope.freq_base must be"),
    "heads": ({"attention__head_count_kv": 3}, "cannot share 3"),
}


@pytest.mark.parametrize("name", GGUF_REFUSED)
def test_gguf_refused_by_name(name: str, plain: GgufFile) -> None:
    fields, message = GGUF_REFUSED[name]
    with pytest.raises(ModelError) as caught:
        config_from_gguf(changed(plain, **fields))
    assert str(plain.path) in str(caught.value)
    assert message in str(caught.value)


def test_gguf_without_an_embedding(plain: GgufFile) -> None:
    tensors = {name: t for name, t in plain.tensors.items() if name != "token_embd.weight"}
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        config_from_gguf(GgufFile(plain.metadata, tensors, plain.path))
