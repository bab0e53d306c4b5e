"""What lies in deploy/ fits the server: names of metrics, options, environment variables, times."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from obole.cache.tiers.reuse import ReuseEstimator
from obole.cache.tiers.store import StoreStats, TierStats
from obole.server.config import FIELDS, ServerConfig
from obole.server.metrics import Metrics
from obole.server.serve import FLUSH_SECONDS
from obole.types import Tier

DEPLOY = Path(__file__).parents[2] / "deploy"
IDLE = SimpleNamespace(running=0, waiting=0, blocks_used=0, blocks_total=1)
OTHERS = {"OBOLE_CACHE", "OBOLE_MODEL", "OBOLE_API_KEYS"}  # variables that are not generated from `ServerConfig`


def read(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


def exported() -> set[str]:
    """Names that /metrics has: of samples, and of families that have none yet."""
    reuse = ReuseEstimator()
    reuse.prompt([b"a block"], 0.0, 0)
    reuse.prompt([b"a block"], 1.0, 1)
    stats = StoreStats(
        tiers={Tier.RAM: TierStats(1, 1, 1, 1, 1, 1, None)},
        misses={"checksum": 1},
        dropped_writes=1,
        write_errors=1,
        documents=1,
        document_bytes=1,
        disk_bytes=1,
    )
    engine = SimpleNamespace(snapshot=lambda: IDLE, tier_stats=lambda: stats, reuse=reuse.value)
    page = Metrics(engine).page().decode()
    names: set[str] = set()
    for family in text_string_to_metric_families(page):
        names |= {sample.name for sample in family.samples}
        names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    return names


def expressions() -> list[str]:
    return [target["expr"] for panel in json.loads(read("grafana-dashboard.json"))["panels"] for target in panel["targets"]]


def test_the_dashboard_names_metrics_that_there_are() -> None:
    used = {name for expression in expressions() for name in re.findall(r"\bobole_\w+", expression)}
    assert len(used) > 15
    assert used <= exported()
    document = read("grafana-dashboard.json")
    assert set(re.findall(r"\bobole_\w+", document)) == used


def test_the_dashboard_shows_every_metric() -> None:
    used = {re.sub(r"_bucket$", "", name) for expression in expressions() for name in re.findall(r"\bobole_\w+", expression)}
    assert {name for name in exported() if not re.search(r"_(bucket|sum|count|created)$", name)} == used


def test_the_panels_of_the_dashboard_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(read("grafana-dashboard.json"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("name", ["Dockerfile", "obole.service", "README.md"])
def test_environment_variables_are_known(name: str) -> None:
    known = {f"OBOLE_SERVER_{field.upper()}" for field in FIELDS} | OTHERS
    used = {word for word in re.findall(r"\bOBOLE_[A-Z_]*[A-Z]\b", read(name)) if word != "OBOLE_SERVER"}
    assert used
    assert used <= known


def test_the_service_waits_for_the_end() -> None:
    unit = dict(line.split("=", 1) for line in read("obole.service").splitlines() if re.match(r"[A-Z]\w+=", line))
    assert unit["KillSignal"] == "SIGTERM"
    assert unit["KillMode"] == "mixed"
    drain = float(re.findall(r"OBOLE_SERVER_DRAIN_SECONDS=(\d+)", read("obole.service"))[0])
    assert drain == ServerConfig().drain_seconds
    assert float(unit["TimeoutStopSec"]) > drain + FLUSH_SECONDS + 5
    assert shlex.split(unit["ExecStart"])[1] == "serve"


def test_the_image() -> None:
    steps = [line.split(maxsplit=1) for line in read("Dockerfile").splitlines() if re.match(r"[A-Z]+ ", line)]
    assert json.loads(dict(steps)["ENTRYPOINT"]) == ["tini", "--", "obole", "serve"]  # as it is, so that signals arrive
    last = [name for name, _ in steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]]
    assert last.index("USER") < last.index("ENTRYPOINT")
    final = read("Dockerfile").rpartition("\nFROM ")[2]
    assert "g++" not in final
    assert "/health" in final
