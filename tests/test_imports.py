"""The floors of the house: imports go downwards only, heavy libraries stay in their rooms, files stay small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "obole"

GROUND = ("types", "config", "costmodel", "errors", "prices")
FLOORS = (
    GROUND,
    ("kernels",),
    ("cache", "layers", "weights", "text"),
    ("scheduler", "speculate", "routing", "models"),
    ("engine",),
    ("cli", "server", "cluster", "simulate", "bench", "economics", "distill"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

TORCH_ROOMS = {"kernels", "layers", "weights", "models", "engine", "distill", "bench"}  # and cache/pool.py
LIBRARIES = {
    "torch": TORCH_ROOMS,
    "ray": {"cluster"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "typer": {"cli"},
}
GROUND_LIBRARIES = {"numpy"}
FILE_BUDGET = 500

Import = tuple[str, int]  # dotted name, line


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import in a module of `package`, also those inside functions, with relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from obole import cache` names a room in its second half
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a path or dotted name below obole/: ("cache", "pool") -> "cache"."""
    return parts[0].removesuffix(".py")


def uses_torch(parts: tuple[str, ...]) -> bool:
    if parts[:2] == ("kernels", "_native"):  # the C++ module
        return False
    return room_of(parts) in TORCH_ROOMS or parts[:2] in {("cache", "pool"), ("cache", "pool.py")}


def faults(parts: tuple[str, ...], imported: str) -> Iterator[str]:
    """What is wrong with the module at `parts` (below obole/) importing the dotted name `imported`."""
    room = room_of(parts)
    top, *rest = imported.split(".")
    if top != "obole":
        if top == "torch" and not uses_torch(parts):
            yield "torch stays in " + ", ".join(sorted(TORCH_ROOMS)) + " and cache/pool.py"
        elif top != "torch" and room not in LIBRARIES.get(top, {room}):
            yield f"{top} stays in {', '.join(LIBRARIES[top])}"
        if room in GROUND and not (top in GROUND_LIBRARIES or top in sys.stdlib_module_names):
            yield "the ground floor imports only itself, numpy and the standard library"
        return
    other = room_of(tuple(rest)) if rest else "__init__"
    if room == "cli" or other == room:
        return
    if other not in FLOOR:
        if FLOOR[room] < FLOOR["cli"]:  # the front door, obole/__init__.py, leads to the engine
            yield f"{other} is on no floor"
    elif FLOOR[other] > FLOOR[room]:
        yield f"{other} is on floor {FLOOR[other]}, above {room} on floor {FLOOR[room]}"
    elif FLOOR[other] == FLOOR[room] and room not in GROUND:
        yield f"{other} is a neighbour of {room}: rooms of one floor do not import each other"
    elif uses_torch(tuple(rest)) and not uses_torch(parts) and FLOOR[room] < FLOOR["engine"]:
        yield f"{other} brings torch into {room}"


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path: Path) -> None:
    parts = path.relative_to(SOURCE).parts
    assert room_of(parts) in FLOOR, f"{parts[0]} is on no floor: give it one in FLOORS"
    package = ".".join(("obole", *parts[:-1]))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {imported}: {fault}"
        for imported, line in imports_of(ast.parse(path.read_text()), package)
        for fault in faults(parts, imported)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "imported", "count"),
    [
        ("cache/ledger.py", "obole.scheduler.queue", 1),  # upwards
        ("cache/ledger.py", "obole.layers.rope", 1),  # sideways
        ("cache/ledger.py", "obole.kernels.dispatch", 1),  # torch by the back door
        ("speculate/suffix.py", "obole.kernels._native.SuffixIndex", 0),
        ("cache/pool.py", "obole.kernels.dispatch", 0),
        ("cache/ledger.py", "torch", 1),
        ("cache/pool.py", "torch.nn", 0),
        ("scheduler/scheduler.py", "obole.cache.pool.KVPool", 1),
        ("scheduler/scheduler.py", "obole.cache.managers", 0),
        ("engine/engine.py", "obole.scheduler", 0),
        ("engine/engine.py", "obole.cli.app", 1),
        ("engine/engine.py", "obole.Engine", 1),
        ("models/llama.py", "fastapi", 1),
        ("types.py", "obole.errors", 0),
        ("types.py", "obole.cache.spec", 1),
        ("types.py", "blake3", 1),
        ("types.py", "numpy", 0),
        ("server/app.py", "obole.economics", 1),
        ("server/app.py", "obole.Engine", 0),
        ("cli/run.py", "obole.economics", 0),
        ("cli/bench.py", "obole.bench.latency", 0),
        ("bench/latency.py", "obole.engine.engine", 0),
        ("bench/latency.py", "obole.cli.terminal", 1),
        ("server/app.py", "obole.bench.latency", 1),  # only the command line runs benchmarks
    ],
)
def test_the_rules_themselves(module: str, imported: str, count: int) -> None:
    assert len(list(faults(Path(module).parts, imported))) == count


def test_imports_inside_functions_and_relative_ones_are_seen() -> None:
    tree = ast.parse("def f():\n    from ..layers import rope\n    from . import ledger\n    import torch.nn")
    assert {name for name, _ in imports_of(tree, "obole.cache")} == {"obole.layers.rope", "obole.cache.ledger", "torch.nn"}


def test_files_stay_within_the_budget() -> None:
    files = [
        *SOURCE.rglob("*.py"),
        *(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cpp", ".h", ".hpp", ".inc", ".cc"}),
    ]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > FILE_BUDGET}
    assert not long, f"over {FILE_BUDGET} lines, so they want splitting: {long}"
