"""Energy counters, from a tree like that under /sys and from none."""

from __future__ import annotations

from pathlib import Path

import pytest

from obole.economics.energy import Counter, Meter, gpus, meter, rapl


def domain(folder: Path, name: str, label: str, energy: int, range_: int = 1_000_000) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(f"{label}\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    (path / "max_energy_range_uj").write_text(f"{range_}\n")
    return path


def test_packages_are_summed_and_wrap(tmp_path):
    first = domain(tmp_path, "intel-rapl:0", "package-0", 900_000)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 0)
    domain(tmp_path, "intel-rapl:0:0", "core", 0)  # part of its package
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 0)  # the same once more
    spent = meter(tmp_path, "no such library")
    assert spent.look() == {"0 package-0": 0.0, "1 package-1": 0.0}
    (first / "energy_uj").write_text("100000")  # over its limit of one joule
    (second / "energy_uj").write_text("250000")
    assert spent.look() == pytest.approx({"0 package-0": 0.2, "1 package-1": 0.25})
    (first / "energy_uj").unlink()
    (second / "energy_uj").write_text("300000")
    assert spent.look() == pytest.approx({"0 package-0": 0.2, "1 package-1": 0.3})


def test_what_is_not_there_or_not_to_be_read(tmp_path):
    assert meter(tmp_path / "none", "no such library").look() == {}
    broken = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    (broken / "energy_uj").unlink()  # as where only root may read it
    assert rapl(tmp_path) == []
    (broken / "energy_uj").write_text("many")
    assert rapl(tmp_path) == []
    assert gpus("no such library") == []


def test_a_counter_that_fails_at_first_counts_for_nothing():
    def fails() -> float:
        raise OSError

    assert Meter([Counter("a", fails)]).look() == {}
