"""The GGUF reader: right values, and B54 of the known faults: hostile headers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from obole.errors import ModelError
from obole.weights.gguf import read_gguf
from tests.fakes.checkpoints import byte_tokenizer, random_weights, tiny_config, write_gguf
from tests.weights import raw

HUGE = (2**31, 2**63, 2**64 - 1, 0)
EIGHT = bytes(32)


def write(path: Path, content: bytes) -> Path:
    file = path / "model.gguf"
    file.write_bytes(content)
    return file


def test_reads_what_the_reference_package_writes(tmp_path: Path) -> None:
    config = tiny_config("llama")
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), kind="Q8_0", tokenizer=byte_tokenizer())
    ours, theirs = read_gguf(path), reference.GGUFReader(path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, mine.shape) == (tensor.tensor_type.name, tuple(map(int, reversed(tensor.shape))))
        assert mine.data.tobytes() == tensor.data.tobytes()
        assert not mine.data.flags.writeable
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value, wanted = ours.metadata[name], field.contents()
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == wanted, name


def test_every_scalar_type(tmp_path: Path) -> None:
    writer = reference.GGUFWriter(tmp_path / "m.gguf", "x")
    values = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**32 - 1, "int32": -5, "uint64": 2**63,
              "int64": -(2**62), "float32": 0.5, "float64": 0.1, "bool": True, "string": "é"}  # fmt: skip
    for name, value in values.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("truths", [True, False])
    writer.add_array("words", ["a", "", "ü"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    for name, value in values.items():
        assert metadata[name] == value
        assert type(metadata[name]) is type(value)
    assert metadata["numbers"].tolist() == [1, 2, 3]
    assert metadata["truths"].tolist() == [True, False]
    assert metadata["words"] == ["a", "", "ü"]


def test_the_smallest_files(tmp_path: Path) -> None:
    assert read_gguf(write(tmp_path, raw.header(0, 0))).tensors == {}
    file = read_gguf(write(tmp_path, raw.header(0, 0, version=2)))
    assert file.metadata == {}
    tensor = read_gguf(write(tmp_path, raw.gguf(infos=(raw.info(),), data=np.arange(8, dtype="<f4").tobytes()))).tensors["t"]
    assert tensor.data.view("<f4").tolist() == [list(range(8))]
    # bytes after the last tensor are padding
    assert read_gguf(write(tmp_path, raw.gguf(infos=(raw.info(),), data=EIGHT + b"tail"))).tensors["t"].data.shape == (1, 32)


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    words = b"".join(raw.text(f"word{i}") for i in range(150_000))
    path = write(tmp_path, raw.gguf((raw.key("words", raw.ARRAY, raw.array(raw.STRING, 150_000, words)),)))
    assert read_gguf(path).metadata["words"][149_999] == "word149999"


HOSTILE: dict[str, tuple[bytes, str]] = {
    "magic": (raw.header(0, 0, magic=b"GGML"), "not a GGUF file"),
    "only magic": (b"GGUF", "the version"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "version 1": (raw.header(0, 0, version=1), "version 1"),
    "version 99": (raw.header(0, 0, version=99), "version 99"),
    "big-endian": (raw.header(0, 0, version=0x03000000), "big-endian"),
    "no keys counted": (raw.header(1, 0) + raw.key("general.name", raw.STRING, raw.text("x" * 40)), "tensor"),
    "unknown value type": (raw.gguf((raw.key("k", 13, bytes(16)),)), "unknown type 13"),
    "unknown element type": (raw.gguf((raw.key("k", raw.ARRAY, raw.array(99, 1, bytes(8))),)), "unknown type 99"),
    "nested array": (raw.gguf((raw.key("k", raw.ARRAY, raw.array(raw.ARRAY, 1, bytes(16))),)), "array of arrays"),
    "duplicate key": (raw.gguf((raw.key("k", raw.UINT8, b"\1"),) * 2), "'k' occurs twice"),
    "empty key": (raw.gguf((raw.key("", raw.UINT8, b"\1"), raw.key("a", raw.UINT8, b"\1"))), "is empty"),
    "duplicate tensor": (raw.gguf((), (raw.info(),) * 2, EIGHT * 2), "'t' occurs twice"),
    "empty tensor name": (raw.gguf((), (raw.info(""),), EIGHT), "empty"),
    "overlap": (raw.gguf((), (raw.info("a", (16,)), raw.info("b", (16,), offset=32)), EIGHT * 4), "'a' and 'b' overlap"),
    "hole": (raw.gguf((), (raw.info("a"), raw.info("b", offset=64)), EIGHT * 4), "hole of 32 bytes before tensor 'b'"),
    "type lie": (raw.gguf((), (raw.info("a", kind=1, dims=(32,)), raw.info("b", offset=128)), EIGHT * 5), "hole of 64 bytes"),
    "unaligned": (raw.gguf((), (raw.info(offset=4),), EIGHT * 2), "multiple of the alignment"),
    "invalid UTF-8 key": (raw.gguf((raw.key(b"\xff\xfe", raw.UINT8, b"\1"),), data=EIGHT), "UTF-8"),
    "invalid UTF-8 value": (raw.gguf((raw.key("k", raw.STRING, raw.text(b"\xc3\x28")),)), "'k' is not valid UTF-8"),
    "invalid UTF-8 entry": (
        raw.gguf((raw.key("k", raw.ARRAY, raw.array(raw.STRING, 2, raw.text("a") + raw.text(b"\x80"))),)),
        "entry 1 of 'k'",
    ),
    "invalid truth value": (raw.gguf((raw.key("k", raw.BOOL, b"\2"),)), "truth value"),
    "five dimensions": (raw.gguf((), (raw.info(dims=(1,) * 5),), EIGHT), "5 dimensions"),
    "unknown tensor type": (raw.gguf((), (raw.info(kind=77),), EIGHT), "'t' has the type number 77"),
    "unsupported tensor type": (raw.gguf((), (raw.info(kind=10),), EIGHT), "'t' has the type Q2_K"),
    "part of a block": (raw.gguf((), (raw.info(dims=(33,), kind=8),), EIGHT * 4), "whole blocks"),
    "wrapping dimension": (raw.gguf((), (raw.info(dims=(2**42 + 1, 2**22)),), EIGHT), "cannot fit"),
    "alignment of another type": (
        raw.gguf((raw.key("general.alignment", raw.UINT64, raw.u64(32)),), (raw.info(),), EIGHT),
        "must be of type UINT32",
    ),
    "alignment not a power of two": (
        raw.gguf((raw.key("general.alignment", raw.UINT32, raw.u32(48)),), (raw.info(),), EIGHT),
        "general.alignment is 48",
    ),
    "alignment 2**30": (
        raw.gguf((raw.key("general.alignment", raw.UINT32, raw.u32(2**30)),), (raw.info(),), EIGHT),
        "general.alignment is 1073741824",
    ),
    "cut in the data": (raw.gguf((), (raw.info(),), bytes(31)), "the file has"),
    "Git-LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git-LFS pointer"),
    "empty": (b"", "empty"),
}
for _value in HUGE:
    _keys = raw.key("general.alignment", raw.UINT32, raw.u32(_value % 2**32))
    HOSTILE |= {
        f"num_keys {_value}": (raw.header(0, _value or 1) + bytes(80), ""),
        f"num_tensors {_value}": (raw.header(_value or 1, 0) + bytes(80), ""),
        f"key length {_value}": (raw.header(0, 1) + raw.u64(_value) + bytes(70), "key 0"),
        f"string length {_value}": (raw.gguf((raw.key("k", raw.STRING, raw.text("abc", _value)),)) + bytes(40), "'k'")
        if _value
        else (raw.gguf((raw.key("", raw.STRING, raw.text("abc", 0)),)) + bytes(40), "empty"),
        f"array length {_value}": (raw.gguf((raw.key("k", raw.ARRAY, raw.array(raw.UINT8, _value or 2**40, b"")),)), "'k'"),
        f"string array length {_value}": (raw.gguf((raw.key("k", raw.ARRAY, raw.array(8, _value or 2**40, b"")),)), "'k'"),
        f"dims {_value}": (raw.gguf((), (raw.info(num_dims=_value % 2**32),), EIGHT), "dimensions"),
        f"dim {_value}": (raw.gguf((), (raw.info(dims=(8, _value)),), EIGHT), "'t' has the dimensions"),
        f"offset {_value}": (raw.gguf((), (raw.info(offset=_value or 64),), EIGHT), "'t'"),
        f"alignment {_value}": (raw.gguf((_keys,), (raw.info(),), EIGHT), "general.alignment"),
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_by_field(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = write(tmp_path, content)
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


LIMITED = """
import resource, sys, time
from pathlib import Path
from obole.errors import ModelError
from obole.weights.gguf import read_gguf
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20),) * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
slowest = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    start = time.perf_counter()
    try:
        read_gguf(path)
        sys.exit(f"{path}: accepted")
    except ModelError:
        slowest = max(slowest, time.perf_counter() - start)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, slowest)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's account of memory")
def test_hostile_headers_cost_nothing(tmp_path: Path) -> None:
    """All of them under a limit of 256 MiB more than the interpreter has (B54 asks for 1 GiB in all) and a timer."""
    for i, (content, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{i:03}.gguf").write_bytes(content)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, slowest = done.stdout.split()
    assert int(grown) * 1024 < 50 << 20
    assert float(slowest) < 5


def test_cut_anywhere_is_refused(tmp_path: Path) -> None:
    config = tiny_config("qwen2", num_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), kind="Q4_0", tokenizer={"k.words": ["a", "bc"]})
    whole, file = path.read_bytes(), read_gguf(path)
    used = sum(t.data.nbytes for t in file.tensors.values())
    end = max(t.data.__array_interface__["data"][0] + t.data.nbytes for t in file.tensors.values())
    start = min(t.data.__array_interface__["data"][0] for t in file.tensors.values())
    header_end = len(whole) - (end - start) - (-(end - start) % 32)
    assert used <= end - start
    cuts = {*range(0, header_end, 7), header_end - 1, header_end + 1, len(whole) // 2, header_end + (end - start) - 1}
    for length in sorted(cuts):
        with pytest.raises(ModelError, match=str(path)):
            read_gguf(write_cut(path, whole, length))


def write_cut(path: Path, whole: bytes, length: int) -> Path:
    path.unlink()  # a new file: the old one is still mapped
    path.write_bytes(whole[:length])
    return path


def test_a_folder_a_pipe_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such file"):
        read_gguf(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "pipe.gguf"):
        with pytest.raises(ModelError, match="not a regular file"):
            read_gguf(path)


def test_reading_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = write(tmp_path, raw.gguf(infos=(raw.info(),), data=EIGHT))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(min(soft, 2000) + 10):
        read_gguf(path)
