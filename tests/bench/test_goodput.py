"""Requests that come by themselves: when, what they ask, and what is made of the answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from obole.bench.answers import Answer
from obole.bench.arrivals import of_trace, overlaid, poisson
from obole.bench.classes import CLASSES, NOTHING_TO_COPY, Asked, stream_of
from obole.bench.client import Client
from obole.bench.goodput import Arrivals, Missed, Objectives, Round, Traffic, found_in, goodput_json, highest_rate
from obole.bench.load import Load
from obole.bench.openloop import OpenRun, run_open, run_punctually
from obole.cli.bench_open import trace_times
from obole.cli.commands import app
from obole.errors import InvalidRequest

from .scripted import BETWEEN, FIRST, Scripted, refusal, scripted

# -- arrivals -----------------------------------------------------------------------------------------------------------------


@given(st.floats(0.1, 50), st.floats(1, 60), st.integers(0, 2**32))
def test_poisson_arrivals_ascend_within_their_time(rate, seconds, seed):
    found = poisson(rate, seconds, seed)
    assert found == sorted(found)
    assert 0 <= found[0] <= found[-1] < seconds
    assert found == poisson(rate, seconds, seed)


def test_poisson_arrivals_are_as_many_and_as_irregular_as_they_should_be():
    found = np.array(poisson(20.0, 500.0, 1))
    assert len(found) == pytest.approx(10_000, abs=400)  # four standard deviations
    gaps = np.diff(found)
    assert gaps.mean() == pytest.approx(0.05, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # of an exponential distribution both are the same


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 10))
def test_arrivals_of_a_trace(times, scale):
    found = of_trace(times, scale, 1e9)
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == pytest.approx((max(times) - min(times)) * scale)
    assert of_trace(times, scale, 5.0) == [at for at in found if at < 5.0]


@given(st.lists(st.lists(st.floats(0, 1e5), min_size=1, max_size=9).map(sorted), max_size=9), st.integers(0, 99))
def test_sessions_lie_over_each_other(sessions, seed):
    found = overlaid(sessions, seed)
    longest = max((times[-1] for times in sessions), default=0.0)
    assert len(found) == sum(map(len, sessions))
    assert all(0 <= at <= longest for at in found)
    place = 0
    for times in sessions:
        own, place = found[place : place + len(times)], place + len(times)
        for first, second, gap in zip(own, own[1:], np.diff(times), strict=False):
            turns = (second - first - gap) / longest if longest else 0.0  # gaps are kept, but for the way round
            assert turns == pytest.approx(round(turns), abs=1e-6)
    assert found == overlaid(sessions, seed)


def test_times_of_agents_sessions(tmp_path):
    def session(name: str, *times: float) -> str:
        requests = [{"t": at, "in": 64, "out": 2, "hash_ids": [i]} for i, at in enumerate(times)]
        return json.dumps({"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}) + "\n"

    trace = tmp_path / "sessions.jsonl"
    trace.write_text(session("a", 0, 1, 8) + session("b", 0, 4))
    a, b = (found := trace_times(trace))[:3], found[3:]
    assert all(0 <= at <= 8 for at in found)
    assert (a[1] - a[0]) % 8 == pytest.approx(1)
    assert (b[1] - b[0]) % 8 == pytest.approx(4)
    trace.write_text(json.dumps({"id": "a", "block_size": 64, "requests": [{"in": 64, "out": 2, "hash_ids": [0]}]}) + "\n")
    with pytest.raises(InvalidRequest, match="does not tell when"):
        trace_times(trace)


@pytest.mark.parametrize("call", [
    lambda: poisson(0, 1), lambda: poisson(math.inf, 1), lambda: poisson(1, 0), lambda: poisson(1e6, 1e6),
    lambda: of_trace([], 1, 1), lambda: of_trace([1], 0, 1), lambda: stream_of((), 1).__next__(),
    lambda: stream_of(("chat", "chat"), 1).__next__(), lambda: stream_of(("poem",), 1).__next__(),
    lambda: Objectives(ttft=0), lambda: Objectives(share=0), lambda: Objectives(share=1.1), lambda: Objectives(e2e=math.nan),
])  # fmt: skip
def test_what_makes_no_sense(call):
    with pytest.raises(InvalidRequest):
        call()


# -- workloads ----------------------------------------------------------------------------------------------------------------


def test_classes_come_in_equal_shares_and_the_same_seed_gives_the_same():
    kinds = tuple(CLASSES)
    found = list(itertools.islice(stream_of(kinds, 50, 3), 6 * len(kinds)))
    assert {kind: sum(one.kind == kind for one in found) for kind in kinds} == dict.fromkeys(kinds, 6)
    assert found == list(itertools.islice(stream_of(kinds, 50, 3), 6 * len(kinds)))
    assert max(one.max_tokens for one in found) == 50
    texts = [json.dumps(one.messages) for one in found]
    assert len(set(texts)) == len(texts)


def test_an_agents_session_grows_and_shared_prompts_have_one_beginning():
    session = list(itertools.islice(stream_of(("agent",), 50, 0), 6))
    for before, after in itertools.pairwise(session):
        assert after.messages[: len(before.messages)] == before.messages
        assert len(after.messages) == len(before.messages) + 2
    shared = list(itertools.islice(stream_of(("shared",), 50, 0), 3))
    assert len({one.messages[0]["content"] for one in shared}) == 1
    assert len({one.messages[1]["content"] for one in shared}) == 3
    assert len(shared[0].messages[0]["content"]) > 3000


# -- sending ------------------------------------------------------------------------------------------------------------------


def sent(server: Scripted, offsets: list[float], tokens: int = 2) -> OpenRun:
    async def main() -> OpenRun:
        async with scripted(server) as address:
            client = Client(address)
            load = Load(output_tokens=tokens)
            request = client.request("POST", "/v1/chat/completions", load.body([{"role": "user", "content": "x"}], tokens))
            return await run_open(client, [request] * len(offsets), offsets, lambda: None)

    return run_punctually(main())


def test_requests_are_sent_at_their_time_however_long_answers_take():
    server = Scripted()
    found = sent(server, [0.0, 0.01, 0.02, 0.2], tokens=4)
    assert server.most >= 3  # nobody waits for an answer
    assert [round(a.sent - found.started, 6) for a in found.answers] == [0.0, 0.01, 0.02, 0.2]
    assert all(late >= 0 for late in found.late)
    assert all(a.first_token_seconds >= FIRST and a.ended - a.sent >= FIRST + 3 * BETWEEN for a in found.answers)
    assert server.connections == 3  # the last one finds one that is free


def test_latencies_count_from_when_a_request_was_to_be_sent():
    """A client that is held up for 0.3 s must not make the server look fast (coordinated omission)."""

    async def main() -> OpenRun:
        async with scripted(Scripted()) as address:
            client = Client(address)
            body = Load(output_tokens=1).body([{"role": "user", "content": "x"}], 1)
            request = client.request("POST", "/v1/chat/completions", body)
            asyncio.get_running_loop().call_later(0.02, threading.Event().wait, 0.3)
            return await run_open(client, [request] * 3, [0.0, 0.1, 0.2], lambda: None)

    found = run_punctually(main())
    assert found.late[1] > 0.15
    assert found.answers[1].first_token_seconds >= found.late[1] + FIRST * 0.9


def test_a_hopeless_rate_is_given_up():
    async def main() -> OpenRun:
        async with scripted(Scripted()) as address:
            client = Client(address)
            body = Load(output_tokens=1).body([{"role": "user", "content": "x"}], 1)
            request = client.request("POST", "/v1/chat/completions", body)
            missed = Missed(Objectives(ttft=1, share=0.75), 8)
            return await run_open(client, [request] * 8, [0.0, 0.0, 0.0, 0.01, 30.0, 30.0, 30.0, 30.0], lambda: None, missed)

    found = run_punctually(main())
    assert found.ended - found.started < 10
    assert len(found.answers) == 8
    assert [answer.problem for answer in found.answers[4:]] == ["given up"] * 4
    assert [answer.problem for answer in found.answers[:3]] == [""] * 3  # the third one of two that may miss


# -- what is made of it -------------------------------------------------------------------------------------------------------


def made(*answers: Answer) -> Round:
    kinds = itertools.cycle(("chat", "rag"))
    asked = tuple(Asked(next(kinds), [], 4) for _ in answers)
    return Round(asked, OpenRun(answers, (0.0,) * len(answers), 0.0, 10.0, 1.0))


FAST = Answer(0.0, 1.0, (0.5, 0.6, 0.8), 10, 0, 4)
SLOW = Answer(1.0, 9.0, (4.0, 9.0), 20, 10, 3)
FAILED = Answer(2.0, 3.0, problem="503: full")


@pytest.mark.parametrize(
    ("objectives", "answers"),
    [
        (Objectives(), [True, True, False]),
        (Objectives(ttft=500), [True, False, False]),
        (Objectives(ttft=3000), [True, True, False]),
        (Objectives(itl=101), [True, False, False]),  # 0.3 s for three tokens; 5 s for two
        (Objectives(itl=99), [False, False, False]),
        (Objectives(itl=2500, e2e=8000), [True, True, False]),
        (Objectives(itl=2500, e2e=7999), [True, False, False]),
    ],
)
def test_objectives(objectives, answers):
    assert [objectives.met(answer) for answer in (FAST, SLOW, FAILED)] == answers


def test_goodput_by_class_and_the_floor():
    traffic = Traffic(
        load=Load(), kinds=("rag", "chat", "prose"), objectives=Objectives(ttft=600), arrivals=Arrivals(seconds=8)
    )
    found = found_in(traffic, [made(FAST, SLOW, FAST, FAILED), made(FAST)])
    assert [row.kind for row in found.classes] == ["rag", "chat"]  # no prose came
    rag, chat = found.classes
    assert (rag.met.values, rag.goodput.values) == ((0.0,), (0.0,))  # of the round in which there was one
    assert (chat.met.values, chat.goodput.values) == ((1.0, 1.0), (0.2, 0.1))
    assert (found.every.met.values, found.every.goodput.values) == ((0.5, 1.0), (0.2, 0.1))
    assert found.every.row.errors == {"503: full": 1}
    long = found_in(dataclasses.replace(traffic, arrivals=Arrivals(seconds=20)), [made(FAST, SLOW)])
    assert (long.every.goodput.values, long.offered.values) == ((0.05,), (0.1,))
    assert found.floor is not None
    assert found.floor.row.first_token_p99_milliseconds.values == (500.0, 500.0)
    assert found.every.row.whole_answer_p50_milliseconds.values == (1000.0, 1000.0)
    document = goodput_json(found, traffic)
    assert document["rows"][0]["repetitions"]["goodput"] == [0.2, 0.1]
    assert {row["kind"] for row in document["classes"]} == {"rag", "chat"}
    assert "chat" in NOTHING_TO_COPY
    assert found_in(Traffic(load=Load(), kinds=("rag",)), [Round((Asked("rag", [], 1),), made(FAST).run)]).floor is None


@given(st.floats(0.01, 1000), st.floats(0.1, 20))
def test_the_highest_rate_is_found_within_a_tenth(limit, start):
    tried = []

    def share_at(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= limit else 0.5

    found = highest_rate(share_at, 0.95, start)
    assert len(tried) <= 12
    if math.isnan(found):
        assert min(tried) > limit
    else:
        assert found <= limit
        assert len(tried) == 12 or limit < found * 1.1


def test_no_rate_is_tried_that_is_too_low_to_say_anything():
    tried = []
    assert math.isnan(highest_rate(lambda rate: bool(tried.append(rate)), 0.95, 8.0, 1.5))
    assert tried == [8.0, 4.0, 2.0]


# -- the command ---------------------------------------------------------------------------------------------------------------


class Apart:
    """A scripted server in a thread of its own."""

    def __init__(self, server: Scripted) -> None:
        self._up, self._loop, self.url = threading.Event(), asyncio.new_event_loop(), ""
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(server),))

    async def _serve(self, server: Scripted) -> None:
        async with scripted(server) as address:
            self.url, self._over = address.url, asyncio.Event()
            self._up.set()
            await self._over.wait()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._up.wait(10)
        return self.url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)
        self._loop.close()


def bench(*arguments: str):
    return CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["bench", "serve", *arguments])


PRICES = 'currency = "USD"\n[per_million]\ninput = 1\ncached = 0\noutput = 10\ncopied = 1\n'


def test_a_run_from_arrivals_to_the_page(tmp_path):
    page, file, prices = tmp_path / "page.html", tmp_path / "run.json", tmp_path / "prices.toml"
    prices.write_text(PRICES)
    options = ("--rate", "40", "--seconds", "0.5", "--workload", "chat,rag,agent", "--output-tokens", "3", "--e2e", "5000")
    with Apart(Scripted()) as url:
        result = bench(url, *options, "--html", str(page), "--json", str(file), "--prices", str(prices))
        assert result.exit_code == 0, result.output
        again = bench(url, *options, "--baseline", str(file), "--json", "-")
        assert again.exit_code == 0, again.output
    document = json.loads(file.read_text())
    assert (document["benchmark"], document["repeat"]) == ("serve", 3)
    assert [row["kind"] for row in document["classes"]] == ["chat", "rag", "agent"]
    [row] = document["rows"]
    assert row["met"] == 1.0
    assert row["whole_answer_p99_milliseconds"] >= 1e3 * (FIRST + 2 * BETWEEN)
    assert document["command"] == ["serve", url, *options, "--prices", str(prices)]
    spent = document["cost"]
    answers = sum(a * b for a, b in zip(row["repetitions"]["requests_per_second"], row["repetitions"]["seconds"], strict=True))
    assert float(spent["parts"]["output"]) == pytest.approx(1e-5 * 3 * answers)  # three tokens each
    assert float(spent["total"]) == pytest.approx(sum(map(float, spent["parts"].values())))
    assert "floor, requests with nothing to copy" in result.stdout
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "<script" not in text
    assert "http://" not in text.replace(url, "")
    changes = json.loads(again.stdout)["changes"]
    assert {change["row"] for change in changes} == {"chat", "rag", "agent", "all", "nothing to copy"}
    assert all(change["low"] <= change["high"] for change in changes)


def test_arrivals_of_a_trace_and_failures(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 * i, "input_length": 9, "output_length": 1, "hash_ids": [i]} for i in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = Scripted()
    server.tell = lambda _: refusal(503, "full") if len(server.seen) % 4 == 0 else None
    with Apart(server) as url:
        result = bench(
            url, "--arrivals", str(trace), "--time-scale", "0.5", "--workload", "chat", "--output-tokens", "1", "--json", "-"
        )
    assert result.exit_code == 1  # the server was to be measured: the warming-up failed
    assert "503: full" in result.output
    server.tell = lambda _: refusal(503, "full") if len(server.seen) == 6 else None
    server.seen.clear()
    with Apart(server) as url:
        result = bench(
            url,
            "--arrivals",
            str(trace),
            "--time-scale",
            "0.5",
            "--workload",
            "chat",
            "--output-tokens",
            "1",
            "--json",
            "-",
            "--repeat",
            "1",
        )
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["arrivals"]["kind"] == "trace"
    assert document["rows"][0]["errors"] == {"503: full": 1}
    assert document["rows"][0]["met"] == 0.75
    assert document["rows"][0]["repetitions"]["seconds"][0] >= 0.15


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--rate", "1", "--concurrency", "2"), 2, "--concurrency"),
        (("--rate", "1", "--requests", "2"), 2, "--requests"),
        (("--find-rate",), 2, "--ttft"),
        (("--find-rate", "--arrivals", "x", "--ttft", "5"), 2, "--arrivals"),
        (("--rate", "1", "--arrivals", "x"), 2, "--arrivals"),
        (("--workload", "chat"), 2, "--rate"),
        (("--ttft", "5"), 2, "--rate"),
        (("--html", "x.html"), 2, "--rate"),
        (("--rate", "-1"), 1, "rate must be"),
        (("--rate", "1", "--workload", "poem"), 1, "poem"),
        (("--rate", "1", "--ttft", "-5"), 1, "ttft"),
        (("--arrivals", "/nowhere"), 1, "/nowhere"),
        (("--rate", "1", "--baseline", "/nowhere"), 1, "/nowhere"),
        (("--rate", "1", "--prices", "/nowhere"), 1, "/nowhere"),
    ],
)
def test_refusals(arguments, status, message):
    result = bench("http://127.0.0.1:9", *arguments)
    assert (result.exit_code, message in result.stderr) == (status, True), result.output
