"""`obole usage`: from the lines of a log to an invoice."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from obole.cli import top
from obole.cli.commands import app

PRICES = '{"currency": "USD", "per_million": {"input": 1, "cached": 0.1, "output": 4, "copied": 2}}'


def line(day: str, tenant: str, usage: dict | None, **more: object) -> str:
    about = {"time": f"{day}T10:00:00Z", "level": "info", "request": "req-1", "status": 200, "tenant": tenant}
    return json.dumps({**about, **({} if usage is None else {"usage": usage}), **more}) + "\n"


LOG = (
    line("2026-12-01", "anna", {"input": 5000, "cached_device": 12000, "output": 1001})
    + line("2026-12-01", "anna", None, error="no")
    + '{"time": "2026-12-01T10:00:00Z", "level": "info", "message": "serves"}\n\n'
    + line("2026-12-02", "anna", {"input": 5001, "copied": 7})
    + line("2026-12-01", "bo", {"input": 5004, "output": 1})
)


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "prices.json").write_text(PRICES)

    def run(*arguments: str, log: str | bytes = LOG, files: int = 1):
        names = []
        for i in range(files):
            path = tmp_path / f"log{i}"
            path.write_bytes(log.encode() if isinstance(log, str) else log)
            names.append(str(path))
        return CliRunner().invoke(app, ["usage", *names, *arguments], input=log if not files else None)

    run.prices = ("--prices", str(tmp_path / "prices.json"))
    return run


def test_lines_sum_to_the_cent(invoke):
    made = json.loads(invoke(*invoke.prices, "--json").stdout)
    assert made["currency"] == "USD"
    assert {(one["tenant"], one["day"], one["kind"]): one["tokens"] for one in made["lines"]} == {
        ("anna", "2026-12-01", "input"): 5000,
        ("anna", "2026-12-01", "cached_device"): 12000,
        ("anna", "2026-12-01", "output"): 1001,
        ("anna", "2026-12-02", "input"): 5001,
        ("anna", "2026-12-02", "copied"): 7,
        ("bo", "2026-12-01", "input"): 5004,
        ("bo", "2026-12-01", "output"): 1,
    }
    # anna: 0.005 + 0.0012 + 0.004004 + 0.005001 + 0.000014 = 0.015219; bo: 0.005008
    assert made["totals"] == {"anna": "0.02", "bo": "0.01"}
    assert made["total"] == "0.03"
    assert sum(Decimal(one["amount"]) for one in made["lines"]) == Decimal("0.03")


def test_the_same_from_standard_input_twice_and_as_csv(invoke):
    rows = list(csv.DictReader(io.StringIO(invoke(*invoke.prices, "--csv", files=0).stdout)))
    assert sum(Decimal(row["amount"]) for row in rows) == Decimal("0.03")
    double = list(csv.DictReader(io.StringIO(invoke(*invoke.prices, "--csv", files=2).stdout)))
    assert [int(row["tokens"]) for row in double] == [2 * int(row["tokens"]) for row in rows]
    table = invoke(*invoke.prices).stdout.splitlines()
    assert table[0].split() == ["tenant", "day", "kind", "tokens", "USD"]
    assert table[-1].split() == ["all", "0.03"]


def test_costs_as_the_server_logged_them(invoke):
    log = line("2026-12-01", "a", {"input": 10}, cost={"input": "1.2345"}, currency="EUR")
    made = json.loads(invoke("--json", log=log).stdout)
    assert (made["currency"], made["total"]) == ("EUR", "1.23")
    mixed = json.loads(invoke("--json", log=log + line("2026-12-01", "b", {"input": 1})).stdout)
    assert (mixed["total"], mixed["totals"]) == (None, {"a": "1.23", "b": None})
    other = log + line("2026-12-01", "a", {"input": 10}, cost={"input": "1"}, currency="USD")
    result = invoke("--json", log=other)
    assert result.exit_code == 1
    assert "prices in EUR and in USD" in result.stdout


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("", "The log is empty"),
        (line("2026-12-01", "a", None), "no request with tokens"),
        (LOG + "10:00:00 POST /v1/chat/completions 200", "Line 7 of"),
        ('{"messages": []}\n', "Line 1 of"),
        (LOG + LOG[:40], "Line 7 of"),
        (line("2026-12-01", "a", {"input": -1}), "Line 1 of"),
        (line("2026-12-01", "a", {"tokens": 1}), "Line 1 of"),
        (b"\x1f\x8b\x00\xff", "Line 1 of"),
        ("[" * 100_000, "Line 1 of"),
    ],
)
def test_logs_that_are_none(invoke, log, message):
    result = invoke(log=log)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not result.stdout


def test_damaged_lines_are_counted_when_they_are_skipped(invoke):
    result = invoke(*invoke.prices, "--skip-bad", "--json", log=LOG + LOG[:40])
    assert json.loads(result.stdout)["total"] == "0.03"
    assert "1 line of 7 skipped" in result.stderr


def test_from_a_server(invoke, monkeypatch):
    page = (
        "# TYPE obole_num_requests_running gauge\nobole_num_requests_running 0\n"
        "# TYPE obole_tenant_usage_tokens_total counter\n"
        'obole_tenant_usage_tokens_total{kind="input",tenant="0"} 5e+06\n'
        'obole_tenant_usage_tokens_total{kind="copied",tenant="1"} 1000\n'
    )
    monkeypatch.setattr(top.Remote, "_get", lambda *_: page.encode())
    made = json.loads(invoke("--url", "http://127.0.0.1:1", *invoke.prices, "--json", files=0).stdout)
    assert made["totals"] == {"0": "5.00", "1": "0.00"}
    assert invoke("--url", "http://127.0.0.1:1").exit_code == 2
    assert invoke("--csv", "--json").exit_code == 2
