"""Prices from measurements: they add up to the rent, and levers move the right way."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from obole.cli import top
from obole.cli.commands import app
from obole.cli.price import parse_margin, parse_objective, parse_rent
from obole.costmodel import StepCost
from obole.economics.attribution import PRICED, costs, levers, parts, traffic_of, unit_seconds
from obole.economics.runs import Run, read_runs
from obole.prices import CACHED

from .documents import SECONDS, latency_document, serve_document, throughput_document

COST = st.builds(
    lambda first, growth, read, context: StepCost(
        [1, 2, 4, 8, 16, 64], [first * (1 + growth * (n - 1)) for n in (1, 2, 4, 8, 16, 64)], context, read
    ),
    st.floats(1e-4, 0.1),
    st.floats(0.01, 1.0),
    st.floats(0, 1e-5),
    st.floats(0, 1e-6),
)
counts = st.integers(0, 10**6)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    tokens = {kind: draw(counts) for kind in PRICED}
    outputs = tokens["output"] + tokens["copied"]
    prompt = float(draw(st.integers(1, 5000)))
    return Run(
        name="run",
        seconds=draw(st.floats(0.1, 1e5)),
        tokens=tokens,
        passes=draw(st.floats(0, outputs)),
        rejected=draw(st.floats(0, 1e6)),
        sequences=draw(st.floats(1, 100)),
        context=prompt + draw(st.floats(0, 1000)),
        prompt=prompt,
        load_seconds=draw(st.floats(0, 1000)),
        step=draw(COST),
        weight_bytes=96_000_000,
        parameters=134_000_000,
    )


def rent_of(run: Run, per_million: dict[str, float]) -> float:
    return sum(run.tokens.get(kind, 0) * price / 1e6 for kind, price in per_million.items())


@given(runs(), st.floats(0.01, 100), st.floats(0, 2))
def test_prices_times_tokens_are_the_rent_of_the_time(run, rent, margin):
    found = costs(run, rent, margin)
    if sum(run.tokens.values()):
        assert rent_of(run, found.per_million) == pytest.approx(rent * run.seconds / 3600 * (1 + margin), rel=1e-9)
    assert all(price >= 0 for price in found.per_million.values())


@given(runs())
def test_all_that_steps_cost_is_attributed(run):
    units = unit_seconds(run)
    attributed = sum(run.tokens[kind] * units[kind] for kind in PRICED)
    t = traffic_of(run)
    expected = parts(t, run.step).total + (run.load_seconds / t.sequences if run.tokens["cached_ssd"] else 0.0)
    if t.output + t.copied and t.input + t.cached:
        assert attributed == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(runs())
def test_cached_input_never_costs_more_than_uncached_but_for_the_wait(run):
    per_million = costs(run, 1.0).per_million
    waiting = dataclasses.replace(run, load_seconds=0.0)
    for found, kinds in ((per_million, ("cached_device", "cached_ram")), (costs(waiting, 1.0).per_million, CACHED.values())):
        assert all(found[kind] <= found["input"] * (1 + 1e-9) for kind in kinds)


def test_tokens_from_ssd_pay_for_the_wait(tmp_path):
    """Seconds waited, shared by the sequences that decoded meanwhile; prices times tokens are the rent as before."""
    tokens = {"input": 100, "cached_device": 400, "cached_ssd": 500, "output": 100}
    step = StepCost([1, 64], [0.02, 0.1], 0.0, 0.0)
    run = Run(
        name="", seconds=10.0, tokens=tokens, passes=100, sequences=2.0, context=1000, prompt=1000, step=step, load_seconds=3.0
    )
    assert unit_seconds(run)["cached_ssd"] - unit_seconds(run)["cached_device"] == pytest.approx(3.0 / 2 / 500)
    assert unit_seconds(run)["cached_ram"] == unit_seconds(run)["cached_device"]
    assert rent_of(run, costs(run, 3600.0).per_million) == pytest.approx(10.0)
    document = serve_document()
    document["rows"][0]["totals"]["load_seconds"] = 1.5
    document["rows"][0]["totals"]["tokens"] |= {"cached_ssd": 160}
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(document))
    [read] = read_runs(path)
    assert read.load_seconds == 1.5
    assert costs(read, 1.0).per_million["cached_ssd"] > costs(read, 1.0).per_million["cached_device"] > 0


def test_a_real_run(tmp_path):
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(serve_document()))
    [run] = read_runs(path)
    assert run.seconds == SECONDS
    assert run.sequences == pytest.approx(1.842, abs=1e-3)
    found = costs(run, 2.10)
    assert rent_of(run, found.per_million) == pytest.approx(2.10 * SECONDS / 3600, rel=1e-12)
    assert found.explained == pytest.approx(0.70, abs=0.01)
    assert found.per_million["cached_device"] < found.per_million["input"] < found.per_million["copied"]
    assert found.per_million["copied"] < found.per_million["output"]
    by_name = {one.name: one for one in levers(run)}
    assert list(by_name) == ["prefix hits", "effective batch", "tokens per pass", "bits of a weight"]
    assert by_name["prefix hits"].now == pytest.approx(160 / 1215)
    assert by_name["tokens per pass"].now == pytest.approx(240 / 123)
    assert by_name["bits of a weight"].now == pytest.approx(8 * 96436224 / 134515008)
    assert all(0 < one.saves < 1 for one in by_name.values())
    assert all(one.factor >= 1 for one in by_name.values())


def test_documents_of_other_benchmarks(tmp_path):
    path = tmp_path / "found.json"
    path.write_text(json.dumps(throughput_document()))
    found = read_runs(path)
    assert [run.sequences for run in found] == [1, 4, 16]
    prices = [costs(run, 1.0).per_million["output"] for run in found]
    assert prices == [pytest.approx(1e6 / 3600 * ms / 1e3 / n) for n, ms in ((1, 28.3), (4, 32.6), (16, 110.0))]
    path.write_text(json.dumps(latency_document()))
    [run] = read_runs(path)
    assert run.seconds == pytest.approx(512 / 640 + 128 / 80)
    assert rent_of(run, costs(run, 3600.0).per_million) == pytest.approx(run.seconds)


def test_another_server_is_priced_by_its_latencies(tmp_path):
    document = serve_document(totals={})
    del document["step_cost"]
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(document))
    [run] = read_runs(path)
    assert run.tokens == {"input": 1055, "cached_device": 160, "output": 240}
    found = costs(run, 2.10)
    assert rent_of(run, found.per_million) == pytest.approx(2.10 * SECONDS / 3600)
    assert found.explained is None
    assert levers(run) == []


def test_levers_follow_the_cost_of_steps():
    """Steps that only read weights: twice the batch is half the price of decoding, half the bits too."""
    step = StepCost([1, 64], [0.01, 0.01])
    tokens = {"output": 1000}
    run = Run(name="", seconds=10, tokens=tokens, passes=1000, step=step, weight_bytes=2, parameters=1)
    found = {one.name: one for one in levers(run)}
    assert found["effective batch"].saves == pytest.approx(0.5)
    assert found["tokens per pass"].saves == pytest.approx(0.5)
    assert found["bits of a weight"].saves == pytest.approx(0.5)
    assert found["bits of a weight"].factor == pytest.approx(1.0)
    four = levers(dataclasses.replace(run, sequences=4.0))
    assert next(one for one in four if one.name == "effective batch").factor == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "no document"),
        (b"\xff", "no document"),
        (b"[]", "no document"),
        (b'{"benchmark": "kernels", "rows": []}', "no document"),
        (b'{"benchmark": "serve", "rows": []}', "lacks what"),
        (b'{"benchmark": "serve", "rows": [{"repetitions": 5}]}', "lacks what"),
        (json.dumps({**serve_document(), "step_cost": {"rows": [2], "seconds": [1]}}).encode(), "lacks what"),
        (json.dumps(serve_document(totals={"tokens": {"input": 0}})).encode(), "no tokens"),
    ],
)
def test_files_that_are_no_measurements(tmp_path, content, message):
    path = tmp_path / "found.json"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["price", "--rent", "1", "--from", str(path)])
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n", " ")


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(serve_document()))
    return lambda *arguments: CliRunner().invoke(app, ["price", "--rent", "2.10/h", "--from", str(path), *arguments])


def test_the_command(invoke):
    plain = json.loads(invoke("--json", "-").stdout)
    margin = json.loads(invoke("--json", "-", "--margin", "50%").stdout)
    assert margin["per_million"] == {kind: pytest.approx(1.5 * price) for kind, price in plain["per_million"].items()}
    table = invoke().stdout
    assert "objective: none" in table
    assert "0.004736" in table  # of 2.10 an hour for 8.12 s
    assert invoke("--objective", "ttft=3s,itl_p50=200ms").exit_code == 0
    missed = invoke("--objective", "ttft=1s")
    assert missed.exit_code == 1
    assert re.search(r"ttft_p99 is 2,6\d\d\.\d ms, not 1,000\.", missed.stderr.replace("\n", " "))
    assert "e2e_p99 was not measured" in invoke("--objective", "e2e=1s").stderr.replace("\n", " ")
    energy = invoke("--energy")
    assert energy.exit_code == 1
    assert "not available" in energy.stderr


def test_the_cheapest_run_that_meets_the_objective_counts(tmp_path):
    path = tmp_path / "throughput.json"
    path.write_text(json.dumps(throughput_document()))

    def run(*more: str) -> str:
        arguments = ["price", "--rent", "1", "--from", str(path), "--json", "-", *more]
        return json.loads(CliRunner().invoke(app, arguments).stdout)["run"]

    assert run() == "16 sequences decoding"
    assert run("--objective", "itl=50ms") == "4 sequences decoding"
    assert run("--objective", "itl=30ms") == "1 sequences decoding"


PAGE = """# TYPE obole_num_requests_running gauge
obole_num_requests_running 0
# TYPE obole_tenant_usage_tokens_total counter
obole_tenant_usage_tokens_total{{kind="input",tenant="0"}} {0}000
obole_tenant_usage_tokens_total{{kind="output",tenant="0"}} {0}00
# TYPE obole_generation_tokens_total counter
obole_generation_tokens_total{{source="model"}} {0}00
# TYPE obole_request_decode_time_seconds histogram
obole_request_decode_time_seconds_bucket{{le="+Inf"}} {0}
obole_request_decode_time_seconds_count {0}
obole_request_decode_time_seconds_sum {0}
# TYPE obole_step_seconds gauge
obole_step_seconds{{rows="1"}} 0.01
obole_step_seconds{{rows="64"}} 0.05
# TYPE obole_step_context_seconds gauge
obole_step_context_seconds 1e-06
# TYPE obole_step_read_seconds gauge
obole_step_read_seconds 1e-06
# TYPE obole_weight_bytes gauge
obole_weight_bytes 1000
# TYPE obole_parameters gauge
obole_parameters 1000
"""


def test_a_server_at_work(monkeypatch):
    looks = iter([PAGE.format(1), PAGE.format(5), PAGE.format(1), PAGE.format(1)])
    monkeypatch.setattr(top.Remote, "_get", lambda *_: next(looks).encode())
    arguments = ["price", "--rent", "3600/h", "--url", "http://127.0.0.1:1", "--seconds", "0.1", "--json"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "-"]).stdout)
    assert found["tokens"] == {"input": 4000, "output": 400}
    spent = sum(found["tokens"].get(kind, 0) * price / 1e6 for kind, price in found["per_million"].items())
    assert spent == pytest.approx(found["seconds"])
    assert [one["name"] for one in found["levers"]][-1] == "bits of a weight"
    idle = CliRunner().invoke(app, arguments[:-1])
    assert idle.exit_code == 1
    assert "No answer ended" in idle.stderr


@pytest.mark.parametrize("arguments", [("--rent", "x"), ("--objective", "speed=1"), ("--margin", "-1"), ("--url", "http://x")])
def test_wrong_usage(invoke, arguments):
    assert invoke(*arguments).exit_code == 2
    assert CliRunner().invoke(app, ["price", "--rent", "1"]).exit_code == 2


def test_what_options_mean():
    assert parse_rent("2.10/h") == parse_rent("2.10") == 2.10
    assert parse_rent("48/day") == 2.0
    assert parse_rent("730/month") == 1.0
    assert parse_margin("30%") == pytest.approx(parse_margin("0.3"))
    assert parse_objective("ttft=1.5s, itl_p90=50ms") == {"ttft_p99": 1500.0, "itl_p90": 50.0}
    assert parse_objective("") == {}
