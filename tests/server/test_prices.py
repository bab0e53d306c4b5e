"""What answers cost: in receipts, in the log and in metrics alike."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from obole.economics.usage_log import Tally
from obole.errors import ConfigError
from obole.prices import exact_sum

from .asking import CHAT, TEXT, events, until, user
from .puppets import open_speaking
from .test_lifecycle import gate, raw, told  # noqa: F401

PRICES = """
currency = "USD"
[per_million]
input = 3
cached = {device = 0.5, ram = 0.7, ssd = 0.9}
output = 10
copied = 4
"""
PROMPT = user("a prompt that is long enough for several blocks of sixteen tokens each, so that it is cached")


@pytest.fixture
def priced(tmp_path, serve_engine):
    (tmp_path / "prices.toml").write_text(PRICES)
    lines: list[str] = []
    served = serve_engine(
        open_speaking(tmp_path, ["one", " two"]),
        api_keys=("sk-first", "sk-second"),
        prices=tmp_path / "prices.toml",
        log_format="json",
    )
    served.server.log._write = lines.append
    served.lines = lines
    return served


def expected(receipt: dict, *, prompt: bool = True) -> Decimal:
    sources = receipt["sources"]
    copied = sum(sources.get(name, 0) for name in ("lookup", "memory", "prediction"))
    tokens = 10 * (receipt["output_tokens"] - copied) + 4 * copied
    if prompt:
        tokens = Decimal(tokens) + 3 * receipt["computed_tokens"] + Decimal("0.5") * receipt["cached_tokens"]
    return Decimal(tokens) / 10**6


def test_receipts_log_and_metrics_say_the_same(priced):
    headers = {"authorization": "Bearer sk-second"}
    paid = []
    for body in ({"messages": PROMPT}, {"messages": PROMPT}, {"messages": PROMPT, "n": 3}):
        answer = priced.client.post(CHAT, json=body, headers=headers).json()
        receipts = answer["obole"]["receipts"]
        for i, receipt in enumerate(receipts):
            total = Decimal(receipt["price"]["total"])
            assert total == exact_sum(map(Decimal, receipt["price"]["parts"].values())) == expected(receipt, prompt=i == 0)
            assert receipt["price"]["currency"] == "USD"
            paid.append(total)
    assert receipts[0]["cached_tokens"] > 0
    assert len(paid) == 5
    until(lambda: len(priced.lines) == 3)  # written when the response is out
    logged = [json.loads(line) for line in priced.lines]
    assert exact_sum(Decimal(a) for entry in logged for a in entry["cost"].values()) == exact_sum(paid)
    assert {entry["currency"] for entry in logged} == {"USD"}
    assert {entry["tenant"] for entry in logged} == {"tenant-1"}
    metrics = priced.client.get("/metrics", headers=headers).text
    [cost] = [row for row in metrics.splitlines() if row.startswith('obole_tenant_cost_total{currency="USD",tenant="1"}')]
    assert float(cost.split()[-1]) == pytest.approx(float(exact_sum(paid)))
    for kind in ("input", "cached_device", "output"):
        [row] = [r for r in metrics.splitlines() if r.startswith(f'obole_tenant_usage_tokens_total{{kind="{kind}"')]
        assert float(row.split()[-1]) == sum(entry["usage"].get(kind, 0) for entry in logged)


LONG = {"prompt": "abc" * 50, "ignore_eos": True, "max_tokens": 3000, "speculate": "off"}
TWO = {"prompt": [LONG["prompt"], "xyz" * 50]}


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "n": 3}, TWO, TWO | {"stream": True}])
def test_who_leaves_pays_for_what_was_computed(priced, gate, more):  # noqa: F811
    """In the log, in the metrics and in an invoice: the tokens that were read and answered until then, and no others."""
    connection = raw(priced, TEXT, LONG | more, key="sk-first")
    until(lambda: gate.steps >= 20)
    gate.open.clear()
    connection.close()
    until(lambda: told(priced))
    gate.open.set()
    until(lambda: priced.lines)
    [line] = priced.lines
    entry = json.loads(line)
    assert (entry["status"], entry["tenant"]) == (499, "tenant-0")
    assert set(entry["finish"]) == {"cancelled"}
    prompts = len(TWO["prompt"]) if "prompt" in more else 1
    usage, cost = entry["usage"], {kind: Decimal(amount) for kind, amount in entry["cost"].items()}
    assert usage["input"] + usage.get("cached_device", 0) == entry["prompt_tokens"] >= 150 * prompts
    assert gate.steps - 4 <= usage["output"] / len(entry["finish"]) <= gate.steps
    assert cost["input"] == Decimal(3 * usage["input"]) / 10**6
    assert cost["output"] == Decimal(10 * usage["output"]) / 10**6
    page = priced.client.get("/metrics", headers={"authorization": "Bearer sk-first"}).text
    metrics = dict(row.rsplit(" ", 1) for row in page.splitlines() if not row.startswith("#"))
    for kind, count in usage.items():
        assert float(metrics[f'obole_tenant_usage_tokens_total{{kind="{kind}",tenant="0"}}']) == count
    total = float(metrics['obole_tenant_cost_total{currency="USD",tenant="0"}'])
    assert total == pytest.approx(float(exact_sum(cost.values())))
    assert float(metrics['obole_generation_tokens_total{source="model"}']) == usage["output"]
    tally = Tally(None)
    tally.read("log", [line.encode()])
    assert {one.kind: (one.tokens, one.exact) for one in tally.usages()} == {k: (n, cost[k]) for k, n in usage.items()}


def test_who_leaves_the_queue_pays_nothing(tmp_path, serve_engine):
    lines: list[str] = []
    served = serve_engine(open_speaking(tmp_path, ["one"], max_sequences=1), log_format="json")
    served.server.log._write = lines.append
    first = raw(served, TEXT, LONG)
    until(lambda: served.server.engine.snapshot().running)
    second = raw(served, TEXT, LONG)
    until(lambda: served.server.engine.snapshot().waiting)
    second.close()
    until(lambda: lines)
    first.close()
    until(lambda: len(lines) == 2)
    queued, running = map(json.loads, lines)
    assert queued["status"] == running["status"] == 499
    assert "usage" not in queued
    assert running["usage"]["output"] > 0


def test_who_leaves_when_all_was_said_pays_once(priced):
    connection = raw(priced, TEXT, {**LONG, "max_tokens": 3}, key="sk-first")
    until(lambda: priced.server.metrics.page().count(b'request_success_total{finished_reason="length"} 1.0'))
    connection.close()
    until(lambda: priced.lines)
    assert json.loads(priced.lines[0])["usage"]["output"] == 3
    assert b'obole_tenant_usage_tokens_total{kind="output",tenant="0"} 3.0' in priced.server.metrics.page()


def test_streams_and_other_apis_have_prices_too(priced):
    headers = {"authorization": "Bearer sk-first"}
    response = priced.client.post(CHAT, json={"messages": PROMPT, "stream": True}, headers=headers)
    last = [event for event in events(response.content) if event.get("obole", {}).get("receipts")]
    assert Decimal(last[-1]["obole"]["receipts"][0]["price"]["total"]) > 0
    for path, body in (
        (TEXT, {"prompt": ["abc", "abd"], "max_tokens": 2}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": PROMPT, "max_tokens": 9}),
    ):
        answer = priced.client.post(path, json=body, headers=headers).json()
        for receipt in answer["obole"]["receipts"]:
            assert Decimal(receipt["price"]["total"]) == expected(receipt)


def test_without_a_list_there_are_no_prices(plain):
    answer = plain.client.post(CHAT, json={"messages": PROMPT}).json()
    assert "price" not in answer["obole"]["receipts"][0]
    text = plain.client.get("/metrics").text
    assert 'obole_tenant_usage_tokens_total{kind="output",tenant="0"}' in text
    assert "obole_tenant_cost_total{" not in text


def test_a_list_that_cannot_be_read_is_refused(tmp_path, serve_engine):
    with pytest.raises(ConfigError, match="cannot be read"):
        serve_engine(open_speaking(tmp_path, ["one"]), prices=tmp_path / "none.toml")
