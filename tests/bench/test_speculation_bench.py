"""Benchmarks of speculation: the same answers twice, counts and shares that hold whatever the speed, and alarms."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from obole.bench import inside, speculation, workloads
from obole.bench.lookup import library_tokens, lookup, scan
from obole.bench.speculation import ALL, DRAFTING, PLAIN, Question, answer, asked_again, counter, questions, rows
from obole.bench.workloads import Task
from obole.cli.commands import app
from obole.engine import runner
from obole.errors import InvalidRequest
from obole.speculate.suffix import SuffixIndex

LOOP = (5, 9, 2, 7) * 6


def asked(count=4, max_tokens=20):
    return [Question("even" if i % 2 else "odd", (3 + i, *LOOP), max_tokens) for i in range(count)]


@pytest.fixture
def engine(tiny_engine):
    opened = tiny_engine("llama")
    with inside.always_drafting(opened, 4):  # so that there are drafts, whatever the machine
        yield opened


@pytest.fixture
def accepts_everything(monkeypatch):
    """Verification that believes every draft."""
    monkeypatch.setattr(runner, "may_follow", lambda _sequence, chosen, offset: offset < 1 or len(chosen) == offset)


def test_rows(engine):
    stages = []
    found = speculation.speculation(engine, asked(), repeat=2, report=lambda *at: stages.append(at))
    assert [row.kind for row in found] == ["odd", "even", ALL]
    assert [row.requests for row in found] == [2, 2, 4]
    assert [at[1:] for at in stages] == [(i, 8) for i in range(8)]
    for row in found:
        assert row.identical
        assert (row.sequences, row.prompt_tokens) == (1, 25)
        assert 0 < row.output_tokens <= 20
        assert row.tokens_per_pass.lowest >= 1
        assert sum(row.sources.values()) == pytest.approx(1)
        for i in range(2):
            ratio = row.on_tokens_per_second.values[i] / row.off_tokens_per_second.values[i]
            assert row.speed_up.values[i] == pytest.approx(ratio)
            assert row.on_p50_milliseconds.values[i] <= row.on_p99_milliseconds.values[i]


def test_what_is_counted_of_one_answer(engine):
    [question] = asked(1)
    off, _, on = (
        answer(engine, [question], ["the same"], how) for how in (PLAIN, DRAFTING, DRAFTING)
    )  # the last one remembers
    for answers in (off, on):
        [result] = answers.results
        assert answers.tokens == len(result.token_ids) - 1 == len(answers.milliseconds)
        assert answers.seconds * 1e3 == pytest.approx(sum(answers.milliseconds))
        assert answers.seconds == pytest.approx(result.receipt.decode_seconds, rel=0.2, abs=0.002)
    assert off.passes == off.tokens
    assert on.passes < on.tokens
    assert off.results[0].token_ids == on.results[0].token_ids


def test_several_at_once(engine):
    found = speculation.speculation(engine, asked(4), sequences=3, repeat=1)
    [row] = found
    assert (row.kind, row.requests, row.sequences, row.identical) == (ALL, 6, 3, True)  # the last group is filled up
    answers = answer(engine, asked(3), [inside.new_tenant() for _ in range(3)], PLAIN)
    assert answers.passes == answers.tokens < sum(len(r.token_ids) for r in answers.results)
    assert answers.seconds < sum(answers.milliseconds) / 1e3 <= 3 * answers.seconds * 1.001


def test_nothing_passes_from_one_request_to_another(engine):
    def receipts(pair):
        return [r.receipt for answers in (pair.off, pair.on) for r in answers.results]

    pairs = []
    for question in asked(2) * 2:
        tenants = [[inside.new_tenant()], [inside.new_tenant()]]
        pairs.append(speculation.answer_both(engine, [question], tenants, "x", swapped=len(pairs) % 2 == 1))
    assert {r.cached_tokens for pair in pairs for r in receipts(pair)} == {0}
    assert all("memory" not in r.drafted for pair in pairs for r in receipts(pair))
    assert all(not pair.off.results[0].receipt.drafted for pair in pairs)


def test_asked_again(engine):
    first, again = asked_again(engine, asked(3), repeat=2)
    assert (first.kind, again.kind) == ("first time", "again")
    assert first.requests == again.requests == 3
    assert first.identical
    assert again.identical
    assert again.tokens_per_pass.median > first.tokens_per_pass.median


@pytest.mark.usefixtures("accepts_everything")
def test_answers_that_differ_are_found(engine):
    assert not all(row.identical for row in speculation.speculation(engine, asked(), repeat=1))


def test_answers_of_one_token_have_no_rate(engine):
    [row] = speculation.speculation(engine, asked(1, max_tokens=1), repeat=1)
    assert row.identical
    assert math.isnan(row.speed_up.median)
    assert math.isnan(row.on_p99_milliseconds.median)


@pytest.mark.parametrize(
    ("settings", "arguments", "field"),
    [
        ({"speculate": "off"}, {}, "speculate"),
        ({}, {"sequences": 9}, "sequences"),
        ({}, {"sequences": 0}, "sequences"),
        ({"blocks": 6}, {"sequences": 4}, "sequences"),
        ({}, {"repeat": 0}, "repeat"),
    ],
)
def test_refusals(tiny_engine, settings, arguments, field):
    with pytest.raises(InvalidRequest) as refusal:
        speculation.speculation(tiny_engine("llama", max_sequences=8, **settings), asked(), **arguments)
    assert refusal.value.field == field


def test_requests_that_do_not_fit_are_counted(tiny_engine, monkeypatch):
    engine = tiny_engine("llama")
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        counter(engine)
    monkeypatch.setattr(inside, "token_ids", lambda _engine, prompt: tuple(range(len(prompt))))
    tasks = [Task("x", "a" * length, 50) for length in (10, 206, 207)]
    kept, left_out = questions(engine, tasks)  # a context of 256
    assert ([len(q.token_ids) for q in kept], left_out) == ([10, 206], 1)
    assert questions(engine, tasks, 49)[1] == 0
    with pytest.raises(InvalidRequest, match="None of 1"):
        questions(engine, tasks[2:])


def test_one_difference_is_enough(engine):
    pair = speculation.answer_both(engine, asked(1), [["a"], ["b"]], "x", swapped=False)
    [result] = pair.on.results
    [choice] = result.choices
    other = dataclasses.replace(result, choices=(dataclasses.replace(choice, token_ids=choice.token_ids[:-1]),))
    wrong = dataclasses.replace(pair, on=dataclasses.replace(pair.on, results=(other,)))
    assert [row.identical for row in rows([[pair, pair], [pair, wrong]])] == [False]
    assert [row.identical for row in rows([[pair, pair], [pair, pair]])] == [True]


# -- the command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def invoke(tiny_folders, monkeypatch):
    """Run a benchmark on a tiny checkpoint, whose requests are token ids."""
    monkeypatch.setattr(speculation, "questions", lambda *_: (asked(4, 12), 3))
    monkeypatch.setattr(speculation, "counter", lambda _: len)
    monkeypatch.setattr(workloads, "edits", lambda *_: [])
    monkeypatch.setenv("NO_COLOR", "1")

    def run(command, *arguments):
        model = [str(tiny_folders("llama")), "--kv-device", "2MiB", "--threads", "2"] if command != "lookup" else []
        return CliRunner().invoke(app, ["bench", command, *model, *arguments])

    return run


@pytest.mark.parametrize("command", ["edit", "rag", "extract", "prose", "specbench", "repeat"])
def test_documents_and_tables(invoke, command, tmp_path):
    file, questions_file = tmp_path / "found.json", tmp_path / "question.jsonl"
    questions_file.write_text('{"category": "qa", "turns": ["Why?"]}')
    more = ["--file", str(questions_file)] if command == "specbench" else []
    result = invoke(command, "--repeat", "1", "--json", str(file), *more)
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert (document["benchmark"], document["speculate"], document["left_out"]) == (command, "auto", 3)
    assert [row["identical"] for row in document["rows"]] == [True] * len(document["rows"])
    kinds = ["first time", "again"] if command == "repeat" else ["odd", "even", "all"]
    assert [row["kind"] for row in document["rows"]] == kinds
    lines = result.stdout.splitlines()
    assert "2 threads" in lines[0]
    assert "times faster" in lines[2]
    assert "3 requests" in result.stderr


@pytest.mark.usefixtures("accepts_everything")
def test_the_alarm(invoke, monkeypatch):
    with_drafts = speculation.speculation

    def always(engine, *rest):
        with inside.always_drafting(engine, 4):
            return with_drafts(engine, *rest)

    monkeypatch.setattr(speculation, "speculation", always)
    result = invoke("prose", "--repeat", "1")
    assert result.exit_code == 1
    assert "NO" in result.stdout
    assert "answers with drafts are not those without" in result.stderr
    result = invoke("prose", "--repeat", "1", "--json", "-")
    assert result.exit_code == 1
    assert not all(row["identical"] for row in json.loads(result.stdout)["rows"])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("edit", "--speculate", "off"), 1, "nothing to compare"),
        (("rag", "--sequences", "300"), 1, "sequences"),
        (("prose", "--output-tokens", "1"), 2, "output-tokens"),
        (("prose", "--json", "/nowhere/at/all.json"), 1, "cannot be written"),
        (("specbench",), 2, "--file"),
        (("specbench", "--file", "/nowhere"), 1, "cannot be read"),
        (("repeat", "--requests", "1000"), 1, "requests"),
        (("lookup", "--contexts", "0"), 2, "whole numbers"),
    ],
)
def test_command_line_refusals(invoke, arguments, status, message):
    result = invoke(*arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert not result.stdout


def test_real_questions(default_model_path):
    command = ["bench", "extract", str(default_model_path), "--limit", "1", "--output-tokens", "4", "--repeat", "1"]
    result = CliRunner().invoke(app, [*command, "--kv-device", "64MiB", "--json", "-"])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)["rows"]
    assert (row["kind"], row["identical"], row["output_tokens"]) == ("extract", True, 4)
    assert row["prompt_tokens"] > 100


# -- lookup ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_scan_finds_what_the_index_finds(tokens):
    index = SuffixIndex()
    index.extend(tokens)
    match, found = index.match(8), scan(np.array(tokens, np.int32))
    assert (match and match.length) == (found and found[0])
    if found is not None:
        length, place = found
        assert tokens[place - length : place] == tokens[len(tokens) - length :]


def test_lookup():
    stages = []
    found = lookup((100, 3000), repeat=2, report=lambda *at: stages.append(at[1:]))
    assert stages == [(i, 4) for i in range(4)]
    assert [row.context for row in found] == [100, 3000]
    for row in found:
        assert len(row.step_microseconds.values) == len(row.build_seconds.values) == len(row.scan_microseconds.values) == 2
        assert row.step_microseconds.lowest > 0 < row.scan_microseconds.lowest
        assert 10 < row.bytes_per_token < 1000


def test_tokens_of_the_library():
    tokens = library_tokens(2000)
    assert tokens.shape == (2000,)
    assert 50 < tokens.max() + 1 == np.unique(tokens).size
    assert np.array_equal(tokens, library_tokens(3000)[:2000])


def test_lookup_refuses_contexts_beyond_the_library(monkeypatch):
    monkeypatch.setattr("obole.bench.lookup.library_words", lambda most: iter(["a", "b"][:most]))
    with pytest.raises(InvalidRequest) as refusal:
        lookup((100,), repeat=1)
    assert refusal.value.field == "contexts"


def test_lookup_on_the_command_line(invoke):
    result = invoke("lookup", "--contexts", "64,128", "--repeat", "1", "--json", "-")
    assert [row["context"] for row in json.loads(result.stdout)["rows"]] == [64, 128]
    assert "by a scan" in invoke("lookup", "--contexts", "64", "--repeat", "1").stdout
