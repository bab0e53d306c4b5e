"""The safetensors reader, against the library, and B55 of the known faults: damaged or mismatched weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from obole.errors import ModelError
from obole.weights.checkpoint import open_checkpoint
from obole.weights.safetensors import INDEX, read_folder, read_safetensors
from tests.fakes.checkpoints import random_weights, tiny_config, write_hf, write_safetensors


def build(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"a": rng.normal(size=(3, 4)).astype(np.float32), "b": rng.normal(size=5).astype(np.float16)}
    save_file(arrays, tmp_path / "m.safetensors", {"format": "np"})
    tensors = read_safetensors(tmp_path / "m.safetensors")
    assert {name: (t.kind, t.shape, t.data.tobytes()) for name, t in tensors.items()} == {
        "a": ("F32", (3, 4), arrays["a"].tobytes()),
        "b": ("F16", (5,), arrays["b"].tobytes()),
    }
    assert tensors["a"].data.shape == (3, 16)
    assert not tensors["a"].data.flags.writeable


def test_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"a": ("BF16", np.array([[0x3F80, 0xC000]], np.uint16))})
    assert read_safetensors(path)["a"].data.tolist() == [[0x80, 0x3F, 0x00, 0xC0]]


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "Git-LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git-LFS"),
    "shorter than its length": (b"\x10\0\0", "wants 8 bytes, but the file has 3"),
    "header cut off": (build({"t": entry()}, b"")[:-1], "the header wants 65 bytes, but 64 follow"),
    "header beyond the file": (build(b"{}", b"", 5000), "wants 5000 bytes, but 2 follow"),
    "header of 2**63": (build(b"{}", b"", 2**63), "9223372036854775808"),
    "not JSON": (build(b"{oops", b""), "not valid JSON"),
    "not UTF-8": (build(b'{"\xff": 1}', b""), "not valid JSON"),
    "nested to death": (build(b"[" * 100_000, b""), "not valid JSON"),
    "a list": (build([], b""), "must be a JSON object"),
    "huge number": (build(b'{"t": ' + b"9" * 5000 + b"}", b""), "not valid JSON"),
    "twice": (build(b'{"t": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "t": {}}', bytes(4)), "occurs twice"),
    "no shape": (build({"t": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)), "must have dtype, shape"),
    "unknown field": (build({"t": {**entry(), "x": 1}}, bytes(16)), "nothing else"),
    "dtype": (build({"t": entry("I64", (2,))}, bytes(16)), "'t' has the dtype 'I64'"),
    "dtype of another type": (build({"t": entry(dtype=7)}, bytes(16)), "'t' has the dtype 7"),  # type: ignore[arg-type]
    "dtype lie": (build({"t": entry("F16")}, bytes(16)), "wants 8 bytes, but has 16"),
    "shape lie": (build({"t": entry(shape=(3, 2))}, bytes(16)), "wants 24 bytes, but has 16"),
    "shape that wraps": (build({"t": entry(shape=(2**62, 4, 4))}, bytes(16)), "but has 16"),
    "negative shape": (build({"t": entry(shape=(-2, -2))}, bytes(16)), "whole numbers"),
    "float shape": (build({"t": entry(shape=(4.0,))}, bytes(16)), "whole numbers"),
    "truth as shape": (build({"t": entry(shape=(True, 4))}, bytes(16)), "whole numbers"),
    "many dimensions": (build({"t": entry(shape=(1,) * 1000)}, bytes(16)), "at most 8"),
    "no dimension": (build({"t": entry(shape=(), offsets=(0, 4))}, bytes(4)), "no row"),
    "no elements": (build({"t": entry(shape=(0, 4), offsets=(0, 0))}, b""), "no row"),
    "reversed offsets": (build({"t": entry(offsets=(16, 0))}, bytes(16)), "in order"),
    "three offsets": (build({"t": entry(offsets=(0, 8, 16))}, bytes(16)), "two whole numbers"),
    "overlap": (build({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24)), "'a' and 'b' overlap"),
    "same place": (build({"a": entry(), "b": entry()}, bytes(16)), "overlap"),
    "hole": (build({"a": entry(), "b": entry(offsets=(20, 36))}, bytes(36)), "hole of 4 bytes before tensor 'b'"),
    "hole at the start": (build({"a": entry(offsets=(4, 20))}, bytes(20)), "hole of 4 bytes"),
    "trailing bytes": (build({"t": entry()}, bytes(17)), "16 wanted, 17 found"),
    "half the data": (build({"t": entry()}, bytes(8)), "want 16 bytes, but 8 follow"),
    "last byte missing": (build({"t": entry()}, bytes(15)), "want 16 bytes, but 15 follow"),
}
OURS = {"dtype", "many dimensions", "no dimension", "no elements", "empty", "unknown field"}  # beyond the library's rules


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_with_numbers(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(DAMAGED.keys() - OURS))
def test_the_cases_are_those_of_the_library(name: str) -> None:
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(DAMAGED[name][0])


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    config = tiny_config("llama")
    return write_hf(tmp_path / "m", config, random_weights(config), shards=3)


def test_shards_hold_what_one_file_holds(sharded: Path, tmp_path: Path) -> None:
    config = tiny_config("llama")
    whole = read_folder(write_hf(tmp_path / "one", config, random_weights(config)))
    parts = read_folder(sharded)
    assert {n: t.data.tobytes() for n, t in parts.items()} == {n: t.data.tobytes() for n, t in whole.items()}


def change_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refused(folder: Path, *messages: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    for message in messages:
        assert message in str(caught.value)


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, "model-00002-of-00003.safetensors", "missing")


def test_an_index_that_names_a_tensor_no_shard_has(sharded: Path) -> None:
    change_index(sharded, lambda m: m.update({"model.extra.weight": "model-00001-of-00003.safetensors"}))
    refused(sharded, "'model.extra.weight'", "model-00001-of-00003.safetensors")


def test_a_shard_with_a_tensor_the_index_does_not_know(sharded: Path) -> None:
    change_index(sharded, lambda m: m.pop("model.norm.weight"))
    refused(sharded, "'model.norm.weight'", "nowhere")


def test_a_shard_of_another_model(sharded: Path, tmp_path: Path) -> None:
    config = tiny_config("qwen3", num_layers=3)
    other = write_hf(tmp_path / "other", config, random_weights(config), shards=3)
    shard = "model-00002-of-00003.safetensors"
    (sharded / shard).write_bytes((other / shard).read_bytes())
    refused(sharded, shard, "another model")


def test_a_shard_of_a_wider_model(sharded: Path, tmp_path: Path) -> None:
    config = tiny_config("llama", hidden_size=128, head_dim=32)
    other = write_hf(tmp_path / "other", config, random_weights(config), shards=3)
    shard = "model-00001-of-00003.safetensors"
    (sharded / shard).write_bytes((other / shard).read_bytes())
    refused(sharded, "(128, 64)", "(128, 128)")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", "model.bin", "a\0.safetensors", 3, None])
def test_an_index_leads_nowhere_else(sharded: Path, name: Any) -> None:
    change_index(sharded, lambda m: m.update({"model.norm.weight": name}))
    refused(sharded, INDEX, "not the name of a safetensors file")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', "{", ""])
def test_a_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder = write_hf(tmp_path / "m", config, random_weights(config))
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor")
    (folder / "config.json").unlink()
    refused(folder, "no config.json")
