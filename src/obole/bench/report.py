"""Benchmarks as JSON: what was measured, on what, when, and every repetition."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from obole import __version__
from obole.bench.machine import Machine
from obole.bench.samples import Samples
from obole.costmodel import StepCost
from obole.engine.results import EngineInfo


def header(benchmark: str, machine: Machine, kernels: str, threads: int) -> dict[str, Any]:
    """What every document begins with that is about kernels of this process."""
    return {**circumstances(benchmark, machine), "kernels": kernels, "threads": threads}


def circumstances(benchmark: str, machine: Machine) -> dict[str, Any]:
    """What every document begins with. The date is UTC, ISO 8601."""
    return {
        "benchmark": benchmark,
        "machine": dataclasses.asdict(machine),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "obole": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "numpy": version("numpy"),
        },
    }


def model_facts(info: EngineInfo) -> dict[str, Any]:
    return {
        "model": info.model,
        "digest": info.weights_digest,
        "weight_bytes": info.weight_bytes,
        "parameters": info.parameters,
        "kv_dtype": info.kv_dtype,
    }


def step_cost(cost: StepCost) -> dict[str, Any]:
    """What steps cost, in seconds: of so many rows, and what a token of context adds for each row and for each sequence."""
    names = ("rows", "seconds", "context_seconds", "read_seconds")
    return {name: list(value) if isinstance(value := getattr(cost, name), list) else value for name in names}


def to_json(row: Any) -> dict[str, Any]:
    """A dataclass as a JSON object: its `Samples` as medians, and all their values under `repetitions`."""
    document: dict[str, Any] = {}
    repetitions: dict[str, Sequence[float]] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Samples):
            document[field.name] = value.median
            repetitions[field.name] = list(value.values)
        else:
            document[field.name] = dict(value) if isinstance(value, Mapping) else value
    if repetitions:
        document["repetitions"] = repetitions
    return document
