"""Texts from files, and rows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.checkpoints import SPECIALS, write_byte_tokenizer
from obole.distill.data import pack, read_prompts, read_texts
from obole.errors import InvalidRequest
from obole.text.folder_tokenizer import tokenizer_from_folder
from obole.text.templates import ChatTemplate
from obole.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
END = 257 + SPECIALS.index("<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = tokenizer_from_folder(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    assert made is not None
    return made


def written(tmp_path: Path, name: str, content: str | list[Any]) -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in content))
    return path


@given(st.lists(st.lists(st.integers(5, 99), max_size=40), max_size=12), st.integers(1, 12), st.integers(1, 12))
def test_rows_hold_the_texts_in_order_and_never_two_of_them(texts: list[list[int]], width: int, least: int) -> None:
    least = min(least, width)
    if all(len(text) < least for text in texts):
        with pytest.raises(InvalidRequest, match="Nothing to train on"):
            pack(texts, width, least, 3)
        return
    rows = pack(texts, width, least, 3)
    assert rows.short == sum(len(text) < least for text in texts)
    pieces = [row[:length] for row, length in zip(rows.ids.tolist(), rows.lengths.tolist(), strict=True)]
    expected = [text[i : i + width] for text in texts for i in range(0, len(text), width)]
    assert pieces == [piece for piece in expected if len(piece) >= least]
    padding = {i for row, length in zip(rows.ids.tolist(), rows.lengths.tolist(), strict=True) for i in row[length:]}
    assert padding <= {3}


def test_what_is_trained_on_has_a_digest() -> None:
    one, other = pack([[5, 6, 7]], 4, 1, 0), pack([[5, 6, 7, 0]], 4, 1, 0)
    assert one.ids.tolist() == other.ids.tolist()
    assert one.digest != other.digest
    assert one.digest == pack([[5, 6, 7]], 4, 1, 0).digest


def test_paragraphs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = written(tmp_path, "a.txt", "\n\none\ntwo\n \t\nthree\r\n\r\nfour\n\n\n\n")
    found = list(read_texts(path, tokenizer, None, END))
    assert [tokenizer.decode(ids[:-1]) for ids in found] == ["one\ntwo", "three", "four"]
    assert {ids[-1] for ids in found} == {END}


def test_lines_of_every_shape(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    lines = [{"text": "one"}, {"prompt": "2 + 2 = ", "completion": "4"}, {"messages": messages}]
    path = written(tmp_path, "a.jsonl", lines)
    template = ChatTemplate(TEMPLATE, tokenizer)
    found = list(read_texts(path, tokenizer, template, END))
    texts = ["one<|im_end|>", "2 + 2 = 4<|im_end|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>"]
    assert found == [tokenizer.encode(text, special=True) for text in texts]
    asked = read_prompts(path, tokenizer, template)
    prompts = ["one", "2 + 2 = ", f"{texts[2]}\n<|im_start|>assistant\n"]
    assert asked == [tokenizer.encode(text, special=True) for text in prompts]


def test_a_text_that_has_its_end_gets_no_other(tmp_path: Path, tokenizer: Tokenizer) -> None:
    [ids] = read_texts(written(tmp_path, "a.txt", "one<|im_end|>"), tokenizer, None, END)
    assert ids.count(END) == 1
    [ids] = read_texts(written(tmp_path, "a.txt", "one<|im_end|>\ntwo"), tokenizer, None, END)
    assert ids.count(END) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"a\.jsonl, line 1 is not JSON"),
        ('{"text": "ok"}\n[1]', r"a\.jsonl, line 2 must be one of"),
        ('{"text": 3}', r"line 1: it must be one of"),
        ('{"body": "x"}', r"line 1: it must be one of"),
        ('{"text": ""}', r"line 1: it must be one of .* with text that is not empty"),
        ('{"prompt": "x"}', r"line 1: it must be one of"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"line 1: the model has no chat template"),
        ('{"text": "\\ud800"}', r"line 1: "),
    ],
)
def test_lines_that_are_none_of_these(tmp_path: Path, tokenizer: Tokenizer, content: str, message: str) -> None:
    path = written(tmp_path, "a.jsonl", content)
    with pytest.raises(InvalidRequest, match=message):
        list(read_texts(path, tokenizer, None, END))


def test_files_that_cannot_be_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        list(read_texts(tmp_path / "missing.txt", tokenizer, None, END))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidRequest, match="is not UTF-8"):
        list(read_texts(tmp_path / "latin.txt", tokenizer, None, END))


def test_nothing_to_train_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    empty, short = written(tmp_path, "empty.txt", "\n\n \n"), written(tmp_path, "short.txt", "a\n\nb")
    with pytest.raises(InvalidRequest, match="there is no text"):
        pack(read_texts(empty, tokenizer, None, END), 160, 32, 0)
    with pytest.raises(InvalidRequest, match=r"all 2 texts are shorter than a region \(32 tokens\)"):
        pack(read_texts(short, tokenizer, None, END), 160, 32, 0)
    with pytest.raises(InvalidRequest, match="holds no prompt"):
        read_prompts(empty, tokenizer, None)
