"""Exported folders: the same model and the same tokenizer in transformers and in the engine, whatever they came from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.text.nasty_texts import HAND_MADE, random_texts

from distill.test_model import logits, random_ids, tiny
from fakes.checkpoints import (
    ARCHITECTURES,
    SPECIALS,
    byte_tokenizer,
    random_weights,
    tiny_config,
    write_byte_tokenizer,
    write_gguf,
    write_hf,
)
from obole import Engine, SamplingParams
from obole.config import ModelConfig, MultiToken, RopeConfig
from obole.distill.config_json import config_document
from obole.distill.export import MASK, export, mask_id_of, text_files
from obole.distill.model import add_mask_token, load_decoder
from obole.engine.assembly import load_text
from obole.errors import ModelError, OboleError
from obole.layers.rope import rope_table
from obole.weights.checkpoint import Checkpoint, open_checkpoint
from obole.weights.hf_config import config_from_hf
from obole.weights.mapped import read_json

TOKENS = 260  # of the tokenizer of bytes
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_embeddings": True},
    "llama, biases": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "llama, linear": {"rope": RopeConfig(kind="linear", factor=4.0)},
    "llama, dynamic": {"rope": RopeConfig(kind="dynamic", factor=2.0)},
    "llama, llama3": {
        "rope": RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_max_position=64, low_freq_factor=1.0)
    },
    "llama, yarn": {"rope": RopeConfig(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.2)},
    "qwen2": {"eos_ids": (2, 5), "bos_id": None},
    "qwen2, sliding layers": {"sliding_window": 16, "sliding_layers": (True, False)},
    "qwen3": {"tie_embeddings": True},
    "gemma3": {},
    "gemma3, another scale": {"attention_scale": 168.0**-0.5, "rope_local": RopeConfig(theta=5000.0)},
}


def config_of(name: str) -> ModelConfig:
    return tiny_config(name.split(",")[0], **CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_written_configuration_is_read_as_it_was(name):
    config = config_of(name)
    assert config_from_hf(json.loads(json.dumps(config_document(config))), {}, "here") == config


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same(name, tmp_path):
    decoder = tiny(name.split(",")[0], **CONFIGS[name])
    # at scores as high as those of random gains on q and k, softmax makes much of small differences
    for tensor_name, view in decoder.tensors().items():
        view.mul_(1.0 if "norm" in tensor_name else 0.5)
    export(decoder, {}, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = random_ids(40)
    with torch.no_grad():
        expected = model(ids).logits
    assert model.dtype == torch.float32
    assert expected.abs().max() > 0.5
    assert (logits(decoder, ids) - expected).abs().max() < 1e-4
    assert (logits(load_decoder(open_checkpoint(tmp_path / "out")), ids) - logits(decoder, ids)).abs().max() < 1e-5


def source(path: Path, arch: str = "llama", **overrides: Any) -> Checkpoint:
    """A tiny model with the tokenizer of bytes, as a GGUF file if `path` ends like one, or as a folder."""
    config = tiny_config(arch, **{"vocab_size": TOKENS, "bos_id": None, "eos_ids": (257, 259), **overrides})
    weights = random_weights(config)
    if path.suffix == ".gguf":
        return open_checkpoint(write_gguf(path, config, weights, tokenizer=byte_tokenizer(chat_template=TEMPLATE)))
    write_byte_tokenizer(path, chat_template=TEMPLATE)
    return open_checkpoint(write_hf(path, config, weights))


def distilled(checkpoint: Checkpoint, out: Path, **settings: Any) -> int:
    """Export the model as it is, with a mask whose id is returned."""
    tokenizer, _ = load_text(checkpoint)
    assert tokenizer is not None
    mask_id = mask_id_of(checkpoint, tokenizer)
    texts = text_files(checkpoint, mask_id)
    decoder = load_decoder(checkpoint)
    add_mask_token(decoder, mask_id, 0)
    export(decoder, texts, out, source=checkpoint, multi_token=MultiToken(mask_id, 16), **settings)
    return mask_id


@pytest.mark.parametrize("kind", ["in.gguf", "in"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_engine_says_the_same(arch, kind, tmp_path):
    checkpoint = source(tmp_path / kind, arch)
    assert distilled(checkpoint, tmp_path / "out") == TOKENS
    assert open_checkpoint(tmp_path / "out").config.multi_token == MultiToken(TOKENS, 16)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    answers = []
    for path in (checkpoint.path, tmp_path / "out"):
        with Engine(path) as engine:
            answers.append([result.token_ids for result in engine.generate(["one", "another"], params)])
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 24


@pytest.mark.parametrize("kind", ["in.gguf", "in"])
def test_transformers_loads_model_tokenizer_and_template(kind, tmp_path):
    checkpoint = source(tmp_path / kind)
    mask_id = distilled(checkpoint, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    own, template = load_text(checkpoint)
    assert own is not None
    assert template is not None
    assert len(tokenizer) == TOKENS + 1
    assert tokenizer.convert_tokens_to_ids(MASK) == mask_id
    assert tokenizer(f"a{MASK}b").input_ids == [97, mask_id, 98]
    assert tokenizer.decode([97, mask_id, 98], skip_special_tokens=True) == "ab"
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nHello<|im_end|>\n"
    ids = tokenizer("<|im_start|>naïve\n<|im_end|>").input_ids
    assert ids == own.encode("<|im_start|>naïve\n<|im_end|>", special=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert set(model.generation_config.eos_token_id) == {257, 259}
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits
    found = logits(load_decoder(open_checkpoint(tmp_path / "out")), torch.tensor([ids]))
    assert (found - expected).abs().max() < 1e-3


def test_weights_in_bfloat16_are_those_rounded(tmp_path):
    checkpoint = source(tmp_path / "in")
    distilled(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    assert read_json(tmp_path / "out" / "config.json")["torch_dtype"] == "bfloat16"
    for name, tensor in load_decoder(open_checkpoint(tmp_path / "out")).tensors().items():
        expected = load_decoder(checkpoint).tensors()[name]
        assert torch.equal(tensor[: len(expected)], expected.to(torch.bfloat16).float())


def test_a_row_without_a_token_serves_as_the_mask(tmp_path):
    checkpoint = source(tmp_path / "in", vocab_size=264)
    assert distilled(checkpoint, tmp_path / "out") == TOKENS
    assert open_checkpoint(tmp_path / "out").config.vocab_size == 264
    with Engine(tmp_path / "out") as engine:
        assert engine.tokenizer.vocab_size == TOKENS + 1


def test_tokens_that_fill_up_a_gguf_vocabulary_are_none(tmp_path):
    config = tiny_config("llama", vocab_size=264, bos_id=None, eos_ids=(257, 259))
    metadata = byte_tokenizer()
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + [f"[PAD{i}]" for i in range(260, 264)]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"] + [5] * 4
    checkpoint = open_checkpoint(write_gguf(tmp_path / "in.gguf", config, random_weights(config), tokenizer=metadata))
    assert distilled(checkpoint, tmp_path / "out") == TOKENS
    assert open_checkpoint(tmp_path / "out").config.vocab_size == 264


def test_a_distilled_model_is_distilled_again_with_the_same_mask(tmp_path):
    distilled(source(tmp_path / "in"), tmp_path / "out")
    again = open_checkpoint(tmp_path / "out")
    tokenizer, _ = load_text(again)
    assert tokenizer is not None
    assert mask_id_of(again, tokenizer) == TOKENS
    texts = text_files(again, TOKENS)
    export(load_decoder(again), texts, tmp_path / "out", source=again, multi_token=MultiToken(TOKENS, 8))
    assert open_checkpoint(tmp_path / "out").config == ModelConfig(
        **{f: getattr(again.config, f) for f in ModelConfig.__slots__ if f != "multi_token"}, multi_token=MultiToken(TOKENS, 8)
    )
    assert (tmp_path / "out" / "tokenizer.json").read_text() == texts["tokenizer.json"]


def test_other_files_and_settings_of_a_folder_are_kept(tmp_path):
    folder = source(tmp_path / "in", vocab_size=TOKENS + 1).path
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": 258}')
    config = read_json(folder / "config.json") | {"some_note": [1, 2]}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"added_tokens_decoder": {"260": {"content": "<extra>", "special": False}}, "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mask_id = distilled(open_checkpoint(folder), tmp_path / "out")
    written = read_json(tmp_path / "out" / "config.json")
    assert written["some_note"] == [1, 2]
    assert written["vocab_size"] == TOKENS + 2
    assert read_json(tmp_path / "out" / "generation_config.json") == {"temperature": 0.7, "eos_token_id": 258}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    stated = read_json(tmp_path / "out" / "tokenizer_config.json")
    assert stated["added_tokens_decoder"][str(mask_id)]["content"] == MASK
    assert stated["model_max_length"] == 77
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(f"a<extra>{MASK}").input_ids == [97, TOKENS, mask_id]


def test_a_tokenizer_with_a_token_of_that_name_is_refused(tmp_path):
    folder = tmp_path / "in"
    source(folder, vocab_size=264)
    write_byte_tokenizer(folder, specials=(*SPECIALS[:1], MASK, *SPECIALS[1:]))
    with pytest.raises(ModelError, match=r"<\|mtp\|> should be token 261, .* makes it 258: it has a token of that name"):
        distilled(open_checkpoint(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_a_gap_is_refused(tmp_path):
    checkpoint = source(tmp_path / "in", vocab_size=300)
    with pytest.raises(ModelError, match=r"should be token 270, .* makes it 260"):
        text_files(checkpoint, 270)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    config = tiny_config("llama")
    checkpoint = open_checkpoint(write_hf(tmp_path / "in", config, random_weights(config)))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        text_files(checkpoint, 128)


def test_the_frequencies_of_llama_3_get_their_parameters_back():
    rope = RopeConfig(kind="llama3", theta=500000.0, factor=32.0, original_max_position=8192)
    plain = RopeConfig(theta=500000.0)
    ours, theirs = (rope_table(one, 64, 131072, 131072, 2).sin[1].double().asin() for one in (rope, plain))
    stored = RopeConfig(theta=500000.0, freq_factors=tuple((theirs / ours).tolist()))
    config = tiny_config("llama", head_dim=64, max_position=131072, rope=stored)
    found = config_from_hf(config_document(config), {}, "here").rope
    assert (found.kind, found.original_max_position, found.freq_factors) == ("llama3", 8192, None)
    assert found.factor == pytest.approx(32.0, rel=1e-5)
    other = tiny_config("llama", head_dim=64, rope=RopeConfig(freq_factors=(1.0, 2.0) * 16))
    with pytest.raises(ModelError, match="start from the model's Hugging Face folder"):
        config_document(other)


def test_a_failed_export_leaves_what_was_there(tmp_path):
    out = tmp_path / "out"
    export(tiny(), {}, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OboleError, match=r"could not be written to .*out"):
        export(tiny("qwen3"), {"x" * 300: "too long a name"}, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    export(tiny("qwen3"), {}, out)
    assert open_checkpoint(out).config.architecture == "qwen3"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o666 & ~umask()}


def umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def test_what_is_no_model_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(OboleError, match="is not overwritten: choose another folder"):
            export(tiny(), {}, path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_tokenizer_of_the_default_model(default_model_path, tmp_path):
    checkpoint = open_checkpoint(default_model_path)
    own, template = load_text(checkpoint)
    assert own is not None
    assert template is not None
    for name, text in text_files(checkpoint, 49152).items():
        (tmp_path / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    assert theirs.convert_tokens_to_ids(MASK) == 49152
    for text in [*HAND_MADE, *random_texts(100), "<|im_start|>user\nHi<|im_end|>"]:
        assert theirs(text).input_ids == own.encode(text, special=True)
    messages = [{"role": "user", "content": "Hello"}]
    expected = template.encode(messages, add_generation_prompt=True)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == expected
