"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from obole.weights.hub import resolve


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The embedded default model (SmolLM2-135M-Instruct, Q4_1), fetched once; a failure to get it fails the test."""
    return Path(resolve("smollm2-135m", None, None))
