"""Damaged files: either what was written, or a `ModelError`; nothing else, ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from obole.errors import ModelError
from obole.kernels.formats import dequantize
from obole.weights.checkpoint import open_checkpoint
from obole.weights.safetensors import read_safetensors
from tests.fakes import checkpoints as make

CONFIG = make.tiny_config("llama", num_layers=1, hidden_size=32, intermediate_size=32, head_dim=8, vocab_size=260)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    weights = make.random_weights(CONFIG)
    make.write_gguf(folder / "m.gguf", CONFIG, weights, kind="Q8_0", tokenizer=make.byte_tokenizer())
    make.write_hf(folder / "m", CONFIG, weights)
    return folder


def header_length(content: bytes, gguf: bool) -> int:
    return content.rindex(b"lm_head") if not gguf else content.rindex(b"output.weight") + 64


def edited(content: bytes, edits: list[tuple[float, int]], span: int) -> bytes:
    result = bytearray(content)
    for place, value in edits:
        result[int(place * span)] = value
    return bytes(result)


def load(path: Path, content: bytes) -> dict[str, np.ndarray] | None:
    path.unlink(missing_ok=True)  # what is mapped elsewhere must not change
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path if path.suffix == ".gguf" else path.parent)
    except ModelError:
        return None
    return {name: dequantize(tensor) for name, tensor in checkpoint.tensors.items()}


@FUZZ
@given(edits=EDITS)
def test_changed_bytes_of_a_gguf_header(edits: list[tuple[float, int]], whole: Path, tmp_path: Path) -> None:
    content = (whole / "m.gguf").read_bytes()
    loaded = load(tmp_path / "m.gguf", edited(content, edits, header_length(content, True)))
    assert loaded is None or len(loaded) == len(make.expected_shapes(CONFIG)) or "lm_head.weight" not in loaded


@FUZZ
@given(edits=EDITS)
def test_changed_bytes_of_a_safetensors_header(edits: list[tuple[float, int]], whole: Path, tmp_path: Path) -> None:
    content = (whole / "m" / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((whole / "m" / "config.json").read_bytes())
    span = 8 + int.from_bytes(content[:8], "little")
    load(tmp_path / "model.safetensors", edited(content, edits, span))


@FUZZ
@given(edits=EDITS)
def test_changed_bytes_of_config_json(edits: list[tuple[float, int]], whole: Path, tmp_path: Path) -> None:
    if not (tmp_path / "model.safetensors").exists():
        (tmp_path / "model.safetensors").symlink_to(whole / "m" / "model.safetensors")
    content = (whole / "m" / "config.json").read_bytes()
    load(tmp_path / "config.json", edited(content, edits, len(content)))


@FUZZ
@given(share=st.floats(0, 1, exclude_max=True), gguf=st.booleans())
def test_cut_files(share: float, gguf: bool, whole: Path, tmp_path: Path) -> None:
    source = whole / ("m.gguf" if gguf else "m/model.safetensors")
    content = source.read_bytes()
    (tmp_path / "config.json").write_bytes((whole / "m" / "config.json").read_bytes())
    target = tmp_path / source.name
    cut, uncut = load(target, content[: int(share * len(content))]), load(target, content)
    assert uncut is not None
    if cut is not None:  # only the padding after the last tensor is gone
        assert gguf
        assert int(share * len(content)) >= len(content) - 31
        assert all(np.array_equal(cut[name], value) for name, value in uncut.items())


@FUZZ
@given(edits=EDITS)
def test_the_library_accepts_what_we_accept(edits: list[tuple[float, int]], whole: Path, tmp_path: Path) -> None:
    content = (whole / "m" / "model.safetensors").read_bytes()
    changed = edited(content, edits, 8 + int.from_bytes(content[:8], "little"))
    path = tmp_path / "m.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(changed)
    try:
        ours = read_safetensors(path)
    except ModelError:
        return
    theirs = dict(safetensors.deserialize(changed))
    assert {n: (tuple(t["shape"]), bytes(t["data"])) for n, t in theirs.items()} == {
        n: (t.shape, t.data.tobytes()) for n, t in ours.items()
    }
