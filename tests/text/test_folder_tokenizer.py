"""Tokenizers from checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from obole.errors import ModelError
from obole.text.folder_tokenizer import tokenizer_from_folder
from obole.text.tokenizer import Tokenizer as OurTokenizer
from tests.text.nasty_texts import HAND_MADE, random_texts
from tests.text.vocabularies import byte_level

CONFIG = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "add_bos_token": False}


def write(folder: Path, made: Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Path:
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> OurTokenizer:
    made = tokenizer_from_folder(folder)
    assert made is not None
    return made


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_ids_are_those_of_the_file(tmp_path: Path, pre: str) -> None:
    made = byte_level(pre)
    made.enable_truncation(8)  # left behind by a training script: a prompt must not be cut
    made.enable_padding(length=16)
    tokenizer = load(write(tmp_path, made, CONFIG))
    made.no_truncation()
    made.no_padding()
    for text in [*HAND_MADE, *random_texts(100)]:
        text += "<|im_start|> <tool_call>"
        assert tokenizer.encode(text, special=True) == made.encode(text, add_special_tokens=False).ids
        ids = tokenizer.encode(text, special=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == made.decode(ids)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (0, 2, False)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == made.get_vocab_size()


def test_no_file_is_none(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}', '{"version": "1.0", "model": null}'])
def test_damaged_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens_decoder": [1]}', '{"added_tokens_decoder": {"x": {}}}'])
def test_damaged_configuration_is_refused(tmp_path: Path, content: str) -> None:
    write(tmp_path, byte_level("gpt-2", size=300))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        tokenizer_from_folder(tmp_path)


def test_named_tokens_are_control_tokens(tmp_path: Path) -> None:
    made = byte_level("gpt-2")
    named = {"additional_special_tokens": ["<tool_call>", {"content": "<think>"}], "eos_token": "<|im_end|>"}
    tokenizer = load(write(tmp_path, made, {}, special_tokens_map=named))
    assert tokenizer.special_ids == {0, 1, 2, made.token_to_id("<tool_call>"), made.token_to_id("<think>")}
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("<tool_call><think>", special=False))
    assert tokenizer.eos_id == 2


def test_tokens_listed_only_in_the_configuration(tmp_path: Path) -> None:
    made = byte_level("gpt-2")
    size = made.get_vocab_size()
    listed = {str(size): {"content": "<new>", "special": True, "lstrip": True, "rstrip": True}}
    tokenizer = load(write(tmp_path, made, {"added_tokens_decoder": listed}))
    assert tokenizer.encode("x \n<new>  ", special=True)[-1:] == [size]
    assert tokenizer.encode("x \n<new>  ", special=True) == tokenizer.encode_pieces([("x \n<new>  ", False)])
    write(tmp_path, made, {"added_tokens_decoder": {str(size + 5): {"content": "<new>"}}})
    with pytest.raises(ModelError, match="not of one model"):
        tokenizer_from_folder(tmp_path)


def test_bos_as_the_post_processor_adds_it(tmp_path: Path) -> None:
    made = byte_level("gpt-2")
    made.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    assert load(write(tmp_path, made, {"bos_token": "<|endoftext|>"})).add_bos
    assert not load(write(tmp_path, made, CONFIG)).add_bos
    assert load(tmp_path).encode("x", special=True) == made.encode("x", add_special_tokens=False).ids


def sentencepiece(*, legacy: bool) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "i", "\u2581h", "\u2581hi"]
    made = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("\u2581", "h"), ("\u2581h", "i")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if legacy:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return made


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_folders(tmp_path: Path, legacy: bool) -> None:
    made = sentencepiece(legacy=legacy)
    tokenizer = load(write(tmp_path, made, {"bos_token": "<s>", "add_bos_token": True}))
    for text in ("hi hi", " hi", "hi</s>hi<s> hi", "</s>", "é hi"):
        expected = made.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=True) == expected
        assert tokenizer.encode_pieces([(text, False)]) == expected
        assert tokenizer.decode(expected) == made.decode(expected)
    literal = tokenizer.encode_pieces([("hi<s>", False), ("</s>", True), ("hi", False)])
    assert tokenizer.decode(literal).endswith("</s>hi")
    # after a token, a space goes in front of a legacy text only
    assert tokenizer.token_bytes(literal[literal.index(1) + 1]) == (b" " if legacy else b"<")


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match="only byte-level and SentencePiece"):
        tokenizer_from_folder(write(tmp_path, made))
