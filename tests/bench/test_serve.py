"""Load on servers: what is sent, what is read of the answers, what is made of it."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.bench.answers import Answer, events, read_answer
from obole.bench.client import Address, Client, Reply, address_of
from obole.bench.load import Lengths, Load, Run, conversations, find_lengths, random_messages, run, warm_up
from obole.bench.serve import against, disturbance, generate, summary
from obole.engine.runner import Runner
from obole.errors import ConfigError, InvalidRequest

from ..server.puppets import open_speaking
from .scripted import BETWEEN, FIRST, TEMPLATE_TOKENS, Scripted, chunk, delta, refusal, scripted

STREAM = chunk(**delta(content="a")) + b": ping\n\n" + chunk(choices=[], usage={"completion_tokens": 3}) + b"data: [DONE]\n\n"


def under_load(load: Load, server: Scripted, key: str = "") -> tuple[Lengths | None, Run]:
    async def main() -> tuple[Lengths | None, Run]:
        async with scripted(server) as address:
            client = Client(address, key)
            lengths = await find_lengths(client, load) if load.prompts is None else None
            server.seen.clear()
            return lengths, await run(client, load, lengths, 0, lambda: None)

    return asyncio.run(main())


# -- addresses and streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("http", "127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/v1/", Address("http", "127.0.0.1", 8000)),
        ("https://example.org/models/v1", Address("https", "example.org", 443, "/models")),
        ("http://[::1]:80", Address("http", "::1", 80)),
    ],
)
def test_addresses(url, address):
    assert address_of(url) == address
    assert address_of(address.url) == address


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:0", "http://x?y=1", "http://[x"])
def test_what_is_no_address(url):
    with pytest.raises(InvalidRequest):
        address_of(url)


@given(st.lists(st.integers(1, len(STREAM)), max_size=20), st.booleans())
def test_events_are_the_same_however_they_arrive(cuts, carriage_returns):
    stream = STREAM.replace(b"\n", b"\r\n") if carriage_returns else STREAM
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    pieces = [(float(end), stream[start:end]) for start, end in pairwise(edges)]
    found = list(events(pieces))
    assert [data for _, data in found] == [data for _, data in events([(0.0, STREAM)])]
    for at, data in found:  # not before its empty line is there
        line = stream.index(data) + len(data)
        assert at >= line + (4 if carriage_returns else 2)


def test_events_with_several_lines_and_without_an_end():
    assert list(events([(1.0, b"event: x\ndata: 1\ndata:2\n\ndata: 3\n")])) == [(1.0, b"1\n2")]


def answer_of(*pieces: bytes, status: int = 200) -> Answer:
    return read_answer(Reply(1.0, status, [(2.0 + i, piece) for i, piece in enumerate(pieces)], 9.0))


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (chunk(error={"message": "too late"}), "too late"),
        (chunk(**delta(content="a")), "broke off"),
        (chunk(**delta(content="a")) + b"data: [DONE]\n\n", "no usage"),
        (chunk(choices=[], usage={"completion_tokens": 0}) + b"data: [DONE]\n\n", "empty"),
        (b"data: {\n\n", "no chunk"),
        (b"data: 3\n\n", "no chunk"),
        (b'data: {"choices": [3]}\n\n', "no chunk"),
        (b"", "broke off"),
    ],
)
def test_streams_that_do_not_count(stream, problem):
    answer = answer_of(stream)
    assert problem in answer.problem
    assert (answer.sent, answer.ended) == (1.0, 9.0)


def test_refusals_are_told_in_their_own_words():
    assert answer_of(b'{"error": {"message": "no such model"}}', status=404).problem == "404: no such model"
    assert answer_of(b'{"error": "no"}', status=400).problem == "400: no"
    assert answer_of(b"<html>", status=502).problem == "502: <html>"
    assert answer_of(status=500).problem == "500: nothing"


def test_only_events_that_bring_something_are_arrivals():
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    answer = answer_of(
        chunk(**delta(role="assistant", content="")),
        chunk(**delta(content="a")),
        chunk(**delta(content=""), obole={"sources": ["model"]}),
        chunk(**delta(tool_calls=[{"index": 0}])),
        chunk(choices=[], usage=usage),
        b"data: [DONE]\n\n",
    )
    assert answer == Answer(1.0, 9.0, (3.0, 4.0, 5.0), 7, 5, 3)
    assert answer.first_token_seconds == 2.0
    assert answer.intervals == [1.0, 1.0]


# -- what is sent -----------------------------------------------------------------------------------------------------------


def test_requests_have_what_was_asked_for():
    load = Load(concurrency=3, requests=7, prompt_tokens=40, output_tokens=2, model_name="m", extra={"speculate": "off"})
    server = Scripted()
    lengths, found = under_load(load, server, key="sk-1")
    assert lengths == Lengths(TEMPLATE_TOKENS, 3.0)
    assert not any(answer.problem for answer in found.answers)
    assert [answer.output_tokens for answer in found.answers] == [2] * 7
    assert {answer.prompt_tokens for answer in found.answers} == {11 + 3 * 10}
    assert {answer.cached_tokens for answer in found.answers} == {2}
    assert server.most == 3
    assert server.connections == 1 + 3  # one for the lengths; every worker keeps its own
    assert all("authorization: Bearer sk-1\r\n" in head for head in server.heads)
    for body in server.seen:
        assert body.pop("messages")
        assert body == {
            "model": "m", "max_tokens": 2, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "speculate": "off",
        }  # fmt: skip


def test_times_are_those_of_the_server():
    _, found = under_load(Load(concurrency=2, requests=4, output_tokens=6), Scripted())
    assert all(answer.first_token_seconds >= FIRST for answer in found.answers)
    row = summary(Load(concurrency=2, requests=4, output_tokens=6), [found])
    assert row.first_token_p50_milliseconds.median >= 1e3 * FIRST
    assert row.between_tokens_p50_milliseconds.median == pytest.approx(1e3 * BETWEEN, rel=0.5)
    assert row.seconds.median >= 2 * (FIRST + 5 * BETWEEN)


def test_given_prompts_come_in_turn():
    prompts = tuple([{"role": "user", "content": text}] for text in ("one", "two"))
    server = Scripted()
    under_load(Load(concurrency=1, requests=5, output_tokens=1, prompts=prompts, ignore_eos=False), server)
    assert [body["messages"][0]["content"] for body in server.seen] == ["one", "two", "one", "two", "one"]
    assert "ignore_eos" not in server.seen[0]


def test_every_random_prompt_is_another():
    load = Load(requests=20)
    rounds = [conversations(load, Lengths(0.0, 1.0), round_) for round_ in (0, 1)]
    texts = [messages[0]["content"] for messages in (*rounds[0], *rounds[1])]
    assert len(set(texts)) == 40
    assert {len(text.split()) for text in texts} == {300}
    assert conversations(load, Lengths(0.0, 1.0), 1) == rounds[1]
    assert random_messages(5, 1, 2) != random_messages(5, 2, 1)


def test_long_prompts_meanwhile():
    load = Load(concurrency=2, requests=12, output_tokens=3, long_prompt_every=0.1, long_prompt_tokens=3000)
    server = Scripted()
    _, found = under_load(load, server)
    assert len(found.answers) == 12
    assert found.long
    assert {answer.prompt_tokens for answer in found.long} == {11 + 3 * 996}
    row = disturbance(load, [found])
    assert row.requests == len(found.long)
    assert row.first_token_milliseconds.median >= 1e3 * FIRST
    assert row.meanwhile_p99_milliseconds.median >= row.meanwhile_p50_milliseconds.median > 0


# -- servers that are not well ----------------------------------------------------------------------------------------------


def test_failures_are_counted_and_nothing_else_counts_them():
    def tell(body):
        return refusal(503, "full") if "two" in body["messages"][0]["content"].split() else None

    prompts = tuple([{"role": "user", "content": text}] for text in ("one", "two"))
    load = Load(concurrency=2, requests=6, output_tokens=4, prompts=prompts)
    _, found = under_load(load, Scripted(tell))
    row = summary(load, [found])
    assert row.errors == {"503: full": 3}
    assert row.output_tokens == 4
    assert row.output_tokens_per_second.median == pytest.approx(12 / row.seconds.median)
    assert row.requests_per_second.median == pytest.approx(3 / row.seconds.median)


def test_a_server_that_fails_altogether():
    load = Load(concurrency=2, requests=3, prompts=([{"role": "user", "content": "x"}],))
    _, found = under_load(load, Scripted(lambda _: b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 9\r\n\r\n"))
    row = summary(load, [found])
    assert row.errors == {"the server closed the connection": 3}
    assert math.isnan(row.first_token_p50_milliseconds.median)
    _, found = under_load(load, Scripted(lambda _: b"connection: close\r\n\r\n"))
    assert all("is not HTTP" in answer.problem for answer in found.answers)


def test_a_connection_that_the_server_closes_after_each_answer():
    body = STREAM
    head = f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    server = Scripted(lambda _: head + body)
    _, found = under_load(Load(concurrency=2, requests=6, prompts=([{"role": "user", "content": "x"}],)), server)
    assert not any(answer.problem for answer in found.answers)
    assert server.connections == 6


def test_a_client_that_gathers_is_woken_for_the_end():
    async def main() -> tuple[list[Reply], Scripted]:
        server = Scripted()
        async with scripted(server) as address:
            client = Client(address).gathering(1 << 16)
            body = Load().body([{"role": "user", "content": "x"}], 9)
            line = client.line()
            return [await line.ask(client.request("POST", "/v1/chat/completions", body)) for _ in range(2)], server

    replies, server = asyncio.run(main())
    assert server.connections == 2
    for reply in replies:
        assert read_answer(reply).output_tokens == 9
        assert not read_answer(reply).problem
        assert len({at for at, _ in reply.pieces}) < 5  # of ten pieces and more


def test_a_connection_that_the_server_closes_without_a_word():
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(STREAM)}\r\n\r\n".encode()
    server = Scripted(lambda _: head + STREAM, answers=2)
    _, found = under_load(Load(concurrency=2, requests=9, prompts=([{"role": "user", "content": "x"}],)), server)
    assert not any(answer.problem for answer in found.answers)
    assert 5 <= server.connections <= 6
    assert len(server.seen) == 9


def test_a_server_that_takes_too_long_or_is_not_there():
    async def main() -> list[Reply]:
        async with scripted(Scripted()) as address:
            line = Client(address, timeout=0.02).line()
            request = Client(address).request(
                "POST", "/", json.dumps({"max_tokens": 9, "messages": [{"content": ""}]}).encode()
            )
            slow = await line.ask(request)
            line.close()
        return [slow, await line.ask(request)]

    slow, gone = asyncio.run(main())
    assert slow.problem == "no whole answer within 0.02 s"
    assert gone.problem
    assert slow.ended >= slow.sent


@pytest.mark.parametrize(
    ("tell", "message"),
    [
        (lambda _: refusal(400, "There is no field 'ignore_eos'."), "cannot be measured: 400: There is no field 'ignore_eos'."),
        (lambda _: refusal(401, "no key"), "401: no key"),
    ],
)
def test_what_cannot_be_measured_is_told_before(tell, message):
    async def main() -> None:
        async with scripted(Scripted(tell)) as address:
            with pytest.raises(ConfigError, match=message):
                await find_lengths(Client(address), Load())
            with pytest.raises(ConfigError, match=message):
                await warm_up(Client(address), Load(), Lengths(0.0, 1.0))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"requests": 0}, "requests"),
        ({"prompts": ()}, "prompts"),
        ({"long_prompt_every": -1.0}, "long_prompt_every"),
        ({"long_prompt_every": math.nan}, "long_prompt_every"),
    ],
)
def test_loads_that_make_no_sense(fields, field):
    with pytest.raises(InvalidRequest) as refused:
        Load(**fields)
    assert refused.value.field == field


def test_prompts_that_are_shorter_than_the_template():
    with pytest.raises(InvalidRequest, match="about 30 tokens") as refused:
        conversations(Load(prompt_tokens=20), Lengths(30.0, 1.2), 0)
    assert refused.value.field == "prompt_tokens"


# -- what is made of it -----------------------------------------------------------------------------------------------------


def made_up(*answers: Answer, long: tuple[Answer, ...] = ()) -> Run:
    return Run(answers, long, 0.0, 10.0, 1.0)


def test_a_row_from_rounds():
    load = Load(concurrency=2, requests=2)
    one = Answer(0.0, 5.0, (1.0, 2.0, 4.0), 10, 4, 6)
    two = Answer(1.0, 6.0, (2.5, 2.5, 5.5), 20, 0, 3)
    row = summary(load, [made_up(one, two), made_up(one, Answer(0.0, 1.0, problem="x"))])
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (40 / 3, 8 / 3, 5)
    assert row.output_tokens_per_second.values == (0.9, 0.6)
    assert row.requests_per_second.values == (0.2, 0.1)
    assert row.first_token_p50_milliseconds.values == (1250.0, 1000.0)
    assert row.between_tokens_p50_milliseconds.values == (1500.0, 1500.0)  # of 1, 2, 0, 3 and of 1, 2
    assert row.tokens_per_event.values == (1.5, 2.0)
    assert row.client_cores.values == (0.1, 0.1)
    assert row.errors == {"x": 1}
    offline = against(row, [1.0, 1.0])
    assert offline.cost_percent.values == pytest.approx((10.0, 40.0))
    assert offline.served_tokens_per_second.values == (0.9, 0.6)


def test_the_same_without_a_server(tmp_path, monkeypatch):
    load = Load(concurrency=3, requests=5, prompts=([{"role": "user", "content": "hi"}],), output_tokens=7)
    sizes: list[int] = []
    run_plan = Runner.run

    def seen(runner, plan):
        sizes.append(len(plan.sequences))
        return run_plan(runner, plan)

    with open_speaking(tmp_path, ["one"], max_sequences=3, speculate="off") as engine:
        monkeypatch.setattr(Runner, "run", seen)
        clock = iter((10.0, 14.0))
        monkeypatch.setattr("obole.bench.serve.time", SimpleNamespace(perf_counter=lambda: next(clock)))
        assert generate(engine, load, conversations(load, None, 0)) == 5 * 7 / 4.0
    assert sizes[:3] == [1, 3, 3]
    assert sum(sizes) >= 5 * 7


def test_intervals_beside_long_prompts():
    answer = Answer(0.0, 9.0, (1.0, 2.0, 4.0, 8.0), 1, 0, 4)
    long = Answer(3.0, 7.0, (5.0, 6.0), 9, 0, 2)  # waited for from 3 to 5
    row = disturbance(Load(long_prompt_every=1.0), [made_up(answer, long=(long,)), made_up(answer)])
    assert row.meanwhile_p50_milliseconds.values[0] == 3000.0  # of 2 and 4
    assert math.isnan(row.meanwhile_p50_milliseconds.values[1])
    assert row.first_token_milliseconds.values[0] == 2000.0
    assert row.between_tokens_p99_to_p50.values == pytest.approx((1.98, 1.98))
    assert row.requests == 1
