"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from fakes.engines import TinyEngine, pool_bytes, write_tiny
from obole import Engine
from obole.weights.hub import resolve

# New examples are for people at work; an automatic run tries the same ones each time, so that what failed can be found again.
settings.register_profile("repeatable", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The embedded default model (SmolLM2-135M-Instruct, Q4_1), fetched once; a failure to get it fails the test."""
    return Path(resolve("smollm2-135m", None, None))


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny random checkpoint of an architecture."""

    @cache
    def folder(arch: str) -> Path:
        return write_tiny(tmp_path_factory.mktemp("tiny") / arch, arch)

    return folder


@pytest.fixture
def tiny_engine(tiny_folders: Callable[[str], Path]) -> Iterator[TinyEngine]:
    """Opens engines on tiny random checkpoints; `blocks` makes the pool that small. Each is closed, idle and balanced."""
    engines: list[Engine] = []

    def open_engine(arch: str, *, blocks: int | None = None, **settings: object) -> Engine:
        folder = tiny_folders(arch)
        if blocks is not None:
            settings["kv_device"] = pool_bytes(folder, blocks)
        engines.append(Engine(folder, **settings))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()
        engine._scheduler.check()
