"""What changed beyond noise, and the gate that fails on it."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from obole.bench.compare import bits, compare, direction, ratio_interval
from obole.cli.bench import settings_of
from obole.cli.commands import app
from obole.errors import InvalidRequest

VALUES = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=9)
MACHINE = {"cpu": "a processor", "cores": 2, "memory_bytes": 1 << 30}


def document(rates: list[float], times: list[float], digest: str = "d", **more):
    row = {"concurrency": 2, "errors": {}, "answers_digest": digest}
    repetitions = {"output_tokens_per_second": rates, "first_token_p50_milliseconds": times, "client_cores": [1.0] * len(times)}
    return {
        "benchmark": "serve", "machine": MACHINE, "date": "today", "repeat": len(rates), "command": ["serve", "m"],
        "rows": [{**row, "repetitions": repetitions}], **more,
    }  # fmt: skip


@settings(deadline=None)
@given(VALUES, VALUES)
def test_the_interval_holds_the_ratio_and_stays_within_the_values(old, new):
    low, high = ratio_interval(old, new, 0.95)
    assert low <= np.median(new) / np.median(old) * (1 + 1e-9)
    assert high >= np.median(new) / np.median(old) * (1 - 1e-9)
    assert min(new) / max(old) <= low <= high <= max(new) / min(old)


@settings(deadline=None, max_examples=40)
@given(VALUES, st.floats(1.1, 10))
def test_nothing_changes_against_itself_and_scales_are_seen(values, factor):
    assert {change.verdict for change in compare(document(values, values), document(values, values))} == {"same"}
    wide = max(values) / min(values)
    slower = document([v / (wide * factor) for v in values], [v * wide * factor for v in values])
    assert {change.verdict for change in compare(document(values, values), slower)} == {"worse"}
    assert {change.verdict for change in compare(slower, document(values, values))} == {"better"}
    assert {change.verdict for change in compare(document(values, values), slower, tolerance=wide**2 * factor)} == {"same"}


def test_false_alarms_are_rare_and_true_ones_are_not():
    draws = np.random.default_rng(0)

    def verdicts(factor: float) -> list[str]:
        old, new = draws.normal(100, 3, 7), draws.normal(100 * factor, 3, 7)
        return [change.verdict for change in compare(document(list(old), list(old)), document(list(new), list(old)))]

    assert sum("worse" in verdicts(1.0) for _ in range(100)) <= 6
    assert sum("worse" in verdicts(0.85) for _ in range(100)) >= 90


@pytest.mark.parametrize(
    ("figure", "sign"),
    [
        ("output_tokens_per_second", 1), ("speed_up", 1), ("goodput", 1), ("first_token_p99_milliseconds", -1),
        ("step_microseconds", -1), ("cost_percent", -1), ("client_cores", 0), ("tokens_per_event", 0),
    ],
)  # fmt: skip
def test_which_way_is_better(figure, sign):
    assert direction(figure) == sign


def test_too_few_repetitions_are_no_verdict():
    assert {change.verdict for change in compare(document([1.0], [1.0]), document([0.1], [9.0]))} == {"unsure"}


@pytest.mark.parametrize("other", [{"benchmark": "latency"}, {"rows": []}, {"rows": [3]}])
def test_what_cannot_be_compared(other):
    with pytest.raises(InvalidRequest):
        compare({**document([1, 1, 1], [1, 1, 1]), **other}, document([1, 1, 1], [1, 1, 1]))


def test_changed_bits():
    one = document([1, 1, 1], [1, 1, 1])
    other = document([1, 1, 1], [1, 1, 1], digest="e")
    assert bits(one, one).same is True
    assert bits(one, other).same is False
    assert bits(one, {**other, "command": ["serve", "m", "--seed", "1"]}).same is None
    assert bits({"rows": [{}]}, {"rows": [{}]}).same is None
    assert bits({"rows": [{}]}, {"rows": [{"identical": False}]}).same is False
    assert bits({"rows": [{}]}, {"rows": [{"identical": True}]}).same is True
    failed = copy.deepcopy(other)
    failed["rows"][0]["errors"] = {"x": 1}
    assert bits(one, failed).same is None


def test_a_command_is_kept_without_files_and_keys():
    given_ = ["serve", "m", "--json", "a", "--repeat", "3", "--api-key=x", "--html=b", "--baseline", "c", "--rate", "1"]
    assert settings_of(given_) == ("serve", "m", "--repeat", "3", "--rate", "1")


def gate(*arguments: str):
    return CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["bench", "gate", *arguments])


def test_the_gate(tmp_path):
    def written(name: str, value) -> str:
        (tmp_path / name).write_text(json.dumps(value))
        return str(tmp_path / name)

    good = written("good", document([100, 101, 102], [5, 6, 7]))
    slow = written("slow", document([80, 81, 82], [5, 6, 7]))
    other = written("other", document([100, 101, 102], [5, 6, 7], digest="e"))
    passed = gate(good, good)
    assert (passed.exit_code, "passed: 0 of 2 figures slower" in passed.stdout) == (0, True), passed.output
    assert "answers: the same" in passed.stdout
    assert gate(slow, good).exit_code == 0  # faster is no failure
    failed = gate(good, slow, "--json", "-")
    assert failed.exit_code == 1
    found = json.loads(failed.stdout)
    assert not found["passed"]
    assert [c["figure"] for c in found["changes"] if c["verdict"] == "worse"] == ["output_tokens_per_second"]
    assert gate(good, slow, "--tolerance", "0.5").exit_code == 0
    changed = gate(good, other)
    assert (changed.exit_code, "answers have other tokens" in changed.stdout) == (1, True)
    once = written("once", document([1.0], [1.0]))
    for arguments in ((once, good), (good, once), (written("none", {"x": 1}), good), ("/nowhere", good)):
        assert gate(*arguments).exit_code == 1
    assert "--repeat 3" in gate(once).stderr
    assert gate(good, good, "--tolerance", "-1").exit_code == 2


def test_the_gate_runs_the_benchmark_again(tmp_path):
    file = tmp_path / "lookup.json"
    command = ["bench", "lookup", "--contexts", "256", "--repeat", "3", "--json", str(file)]
    assert CliRunner().invoke(app, command).exit_code == 0
    result = gate(str(file), "--tolerance", "9")
    assert (result.exit_code, "context 256: step_microseconds" in result.stdout) == (0, True), result.output
    unknown = json.loads(file.read_text())
    del unknown["command"]
    file.write_text(json.dumps(unknown))
    assert "does not say how" in gate(str(file)).stderr
