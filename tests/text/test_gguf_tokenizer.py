"""B56: a tokenizer rebuilt from GGUF metadata gives the ids of the original, or refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from obole.errors import ModelError
from obole.text.gguf_tokenizer import merges_from_scores, tokenizer_from_gguf
from obole.text.tokenizer import Tokenizer
from obole.weights.gguf import read_gguf
from tests.text.nasty_texts import HAND_MADE, random_texts
from tests.text.vocabularies import CONTROL, KINDS, byte_level, gguf_metadata, sentencepiece_ids, sentencepiece_metadata

TEXTS = [*HAND_MADE, *random_texts(450)]


@pytest.mark.parametrize("pre", KINDS)
def test_byte_level_ids_are_those_of_the_original(pre: str) -> None:
    original = byte_level(pre)
    rebuilt = tokenizer_from_gguf(gguf_metadata(original, pre))
    for text in TEXTS:
        text += " <tool_call>\n<|im_end|> <think>"
        original.encode_special_tokens = False
        assert rebuilt.encode(text, special=True) == original.encode(text).ids
        original.encode_special_tokens = True
        assert rebuilt.encode(text, special=False) == original.encode(text).ids
    assert rebuilt.vocab_size == original.get_vocab_size()


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_byte_level_round_trip(pre: str) -> None:
    rebuilt = tokenizer_from_gguf(gguf_metadata(byte_level(pre), pre))
    for text in TEXTS:
        assert rebuilt.decode(rebuilt.encode(text, special=False)) == text


def test_names_of_pre_tokenizers_differ_where_it_matters() -> None:
    metadata = gguf_metadata(byte_level("gpt-2"), "gpt-2")
    ids = {pre: tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": pre}) for pre in KINDS}
    text = "1234567 it'S Cafe\u0301\r\n\r\n  x"
    assert len({tuple(made.encode(text, special=False)) for made in ids.values()}) == len(KINDS)


@pytest.mark.parametrize("pre", [None, "default", "no-such-name", 7, ["qwen2"]])
def test_unknown_pre_tokenizer_is_refused_by_name(pre: Any) -> None:
    metadata = gguf_metadata(byte_level("gpt-2"), "gpt-2") | {"tokenizer.ggml.pre": pre}
    problem = "is missing" if pre is None else re.escape(f"is {pre!r}")
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.pre {problem}"):
        tokenizer_from_gguf({k: v for k, v in metadata.items() if v is not None})


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_its_own_algorithm(prefix: bool) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=prefix)
    tokens, scores, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    rebuilt = tokenizer_from_gguf(metadata)
    checked = 0
    for text in [*HAND_MADE, *random_texts(200)]:
        if "\n\n" in text or "<table>" in text or "\u2581" in text:
            continue  # user-defined tokens: below
        shown = (("\u2581" if prefix else "") + text.replace(" ", "\u2581")) if text else ""
        assert rebuilt.encode(text, special=False) == sentencepiece_ids(shown, tokens, scores, types), text
        assert rebuilt.decode(rebuilt.encode(text, special=False)) == text
        checked += 1
    assert checked > 150


def test_sentencepiece_default_is_a_space_and_bos_in_front() -> None:
    metadata = sentencepiece_metadata(add_bos_token=None)
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("the", special=False, bos=True)
    assert ids[0] == 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" the"
    assert tokenizer.decode(ids) == "the"


def test_user_defined_tokens_match_in_plain_text_control_tokens_do_not() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
    ids = tokenizer.encode("a\n\n\nb<table><start_of_turn></s>", special=False)
    assert tokenizer.id_of("\n\n\n") in ids
    assert tokenizer.id_of("<table>") in ids
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.encode("<start_of_turn>", special=True) == [3]
    assert tokenizer.decode(ids) == "a\n\n\nb<table><start_of_turn></s>"


def test_byte_tokens_are_not_reached_by_their_names() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert 4 + 0x41 not in tokenizer.encode("<0x41>", special=False)
    assert tokenizer.encode("\x07", special=False) == [4 + 7]
    assert tokenizer.token_bytes(4 + 0xE2) == b"\xe2"


def test_merges_from_scores_by_hand() -> None:
    tokens = ["a", "b", "ab", "aab", "aa", "<c>", "\n", "\n\n", "\n\n\n"]
    types = [1, 1, 1, 1, 1, 3, 1, 4, 4]
    scores = [-5.0, -6.0, -2.0, -1.0, -2.0, 0.0, -7.0, -1000.0, -1000.0]
    assert merges_from_scores(tokens, types, scores) == [
        ("\n\n", "\n"),  # user-defined: before all others
        ("\n", "\n\n"),
        ("\n", "\n"),
        ("aa", "b"),  # the best score, the longest left part first
        ("a", "ab"),
        ("a", "b"),  # equal scores and lengths: in the order of the vocabulary
        ("a", "a"),
    ]


def test_spaces_of_user_defined_tokens_are_marks_in_the_vocabulary() -> None:
    metadata = sentencepiece_metadata(add_space_prefix=False)
    metadata["tokenizer.ggml.tokens"].append("  ")
    metadata["tokenizer.ggml.token_type"].append(4)
    metadata["tokenizer.ggml.scores"].append(-1000.0)
    tokenizer = tokenizer_from_gguf(metadata)
    if "\u2581\u2581" not in metadata["tokenizer.ggml.tokens"]:
        assert tokenizer.encode("x  y", special=False)[1:-1] == [tokenizer.vocab_size - 1]


def test_cache_gives_the_same_tokenizer_and_survives_damage(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    folder = tmp_path / "deep" / "cache"
    plain = tokenizer_from_gguf(metadata)
    for damage in (None, b"", b'{"version": "1.0"', b"\xff\xfe"):
        first = tokenizer_from_gguf(metadata, folder)
        (file,) = folder.iterdir()
        second = tokenizer_from_gguf(metadata, folder)
        for text in TEXTS[:80]:
            text += "<s>\n\n<table>"
            expected = plain.encode(text, special=True)
            assert first.encode(text, special=True) == second.encode(text, special=True) == expected
        if damage is not None:
            file.write_bytes(damage)
            assert tokenizer_from_gguf(metadata, folder).encode("a b", special=False) == plain.encode("a b", special=False)
    other = dict(metadata)
    other["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"][:-1], -9999.0]
    tokenizer_from_gguf(other, folder)
    tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_space_prefix": False}, folder)
    assert len(list(folder.iterdir())) == 3  # a name for each tokenizer, and no temporary files


def test_an_unusable_cache_folder_does_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert tokenizer_from_gguf(sentencepiece_metadata(), blocked / "x").vocab_size > 0


def good() -> dict[str, Any]:
    return gguf_metadata(byte_level("gpt-2", size=300), "gpt-2")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "rwkv", "rwkv"),
        ("model", None, "missing"),
        ("model", 3, "3"),
        ("tokens", None, "missing"),
        ("tokens", [], "not empty"),
        ("tokens", "abc", "list"),
        ("tokens", ["a", 3], "must be a string"),
        ("tokens", ["a", "b", "a"], "twice"),
        ("tokens", ["a", "\ud800"], "Unicode"),
        ("token_type", [1], "1 entries"),
        ("token_type", "x", "list"),
        ("merges", None, "missing"),
        ("merges", ["a"], "two tokens"),
        ("merges", ["a b c"], "two tokens"),
        ("merges", ["a unknown_token"], "do not fit"),
        ("merges", ["a \u4e2d"], "do not fit"),
        ("bos_token_id", 10**6, "not the id"),
        ("bos_token_id", -1, "not the id"),
        ("eos_token_id", "2", "not the id"),
        ("eos_token_id", True, "not the id"),
        ("add_bos_token", 1, "true or false"),
        ("pre", "\x00", "not known"),
    ],
)
def test_hostile_metadata_is_refused(key: str, value: Any, message: str) -> None:
    metadata = good() | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf({k: v for k, v in metadata.items() if v is not None})


@pytest.mark.parametrize(
    ("key", "value"),
    [("scores", None), ("scores", [1.0]), ("scores", ["x"]), ("scores", [float("nan")]), ("token_type", [None])],
)
def test_hostile_sentencepiece_metadata_is_refused(key: str, value: Any) -> None:
    metadata = sentencepiece_metadata(size=200)
    if isinstance(value, list) and len(value) == 1 and value != [1.0]:
        value = value * len(metadata["tokenizer.ggml.tokens"])
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelError):
        tokenizer_from_gguf({k: v for k, v in metadata.items() if v is not None})


def test_numpy_arrays_as_the_reader_gives_them() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"] = np.array(metadata["tokenizer.ggml.scores"], np.float32)
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("it works", special=False)) == "it works"


def test_ends_of_turns_are_control_tokens_whatever_the_file_says() -> None:
    metadata = good()
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = [
        4 if text in CONTROL else kind for text, kind in zip(metadata["tokenizer.ggml.tokens"], types, strict=True)
    ]
    tokenizer = tokenizer_from_gguf(metadata)
    assert {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("<|im_end|><|im_start|>", special=False))
    assert tokenizer.end_ids == {0, 2}


def test_unused_ids_stand_for_nothing() -> None:
    metadata = good()
    metadata["tokenizer.ggml.tokens"] += ["[PAD7]", ""]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    tokenizer = tokenizer_from_gguf(metadata)
    size = tokenizer.vocab_size
    assert size == len(metadata["tokenizer.ggml.tokens"])
    assert [tokenizer.token_bytes(i) for i in (size - 2, size - 1, size, size + 10**6, -1)] == [b""] * 5
    assert size - 2 not in tokenizer.encode("[PAD7]", special=True)


@pytest.fixture(scope="module")
def smollm(default_model_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(read_gguf(default_model_path).metadata)


def test_default_model(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_id, smollm.eos_id, smollm.add_bos) == (49152, 1, 2, False)
    assert smollm.encode("Gravity is 9.81", special=False) == [22007, 6463, 314, 216, 41, 30, 40, 33]
    assert smollm.encode("<|im_start|>user\n", special=True) == [1, 4093, 198]
    for text in TEXTS:
        assert smollm.decode(smollm.encode(text, special=False)) == text
