"""The benchmark of several tokens at once: who solves what, in how many passes, and what one may say of it."""

from __future__ import annotations

import dataclasses
import json
import math
from decimal import Decimal

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

from fakes.checkpoints import random_weights, tiny_config, write_hf
from obole import Engine
from obole.bench import mtp
from obole.bench.mtp import as_questions, mean, sides, wilson
from obole.bench.problems import TEST, Problem, arithmetic
from obole.cli.commands import app
from obole.config import MultiToken
from obole.errors import InvalidRequest
from obole.text.tokenizer import byte_alphabet

BYTES = 256
SIZES = dict(vocab_size=BYTES + 2, max_position=512, eos_ids=(BYTES,), bos_id=None)


def write(folder, multi_token):
    """A model of random weights that reads and writes bytes."""
    write_hf(folder, config := tiny_config("llama", **SIZES, multi_token=multi_token), random_weights(config, seed=3))
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model that predicts several tokens at once, and one that doesn't."""
    at = tmp_path_factory.mktemp("mtp")
    return write(at / "several", MultiToken(BYTES + 1, 8)), write(at / "one", None)


@pytest.fixture
def engine(folders):
    with Engine(str(folders[0]), threads=2, kv_device=4 << 20) as opened:
        yield opened


def test_rows(engine):
    stages = []
    compared = sides(engine, [0.0, 1.0], [3], 4)
    assert [side.name for side in compared] == ["plain", "lookup", "verify", "confadapt", "confadapt", "static"]
    asked, questions = as_questions(engine, arithmetic(5, 0, TEST), 12)
    found = mtp.mtp(engine, asked, questions, compared, 2, 2, lambda *at: stages.append(at[1:]))
    assert stages == [(i, 6) for i in range(6)]  # the third group is filled up
    assert [row.setting for row in found] == [None, None, None, 0.0, 1.0, 3]
    plain, lookup, verify, careless, careful, static = found
    for row in found:
        assert (row.problems, row.sequences) == (5, 2)
        assert 0 <= row.accuracy_low <= row.accuracy <= row.accuracy_high <= 1
        assert row.lost == pytest.approx(plain.accuracy - row.accuracy)
        for i in range(2):
            assert row.speed_up.values[i] == pytest.approx(row.tokens_per_second.values[i] / plain.tokens_per_second.values[i])
    for row in (plain, lookup, verify):
        assert (row.same, row.lossy, row.lost, row.lost_error) == (1, False, 0, 0)
    assert (plain.tokens_per_pass.median, plain.speed_up.median) == (1, 1)
    assert careless.lossy
    assert static.lossy
    assert careless.tokens_per_pass.median > 1 == careful.tokens_per_pass.median
    assert 1 < static.tokens_per_pass.median <= 3


def test_each_problem_has_its_own_answers(engine, monkeypatch):
    """What the plain side says is declared to be right: others are right where they say the same."""
    compared = sides(engine, [], [2], 4)
    asked, questions = as_questions(engine, arithmetic(5, 0, TEST), 6)
    params = dataclasses.replace(compared[0].params, max_tokens=6)
    said = dict(zip(asked, (r.text for r in engine.generate([q.token_ids for q in questions], params)), strict=True))
    assert len(set(said.values())) > 1
    monkeypatch.setattr(mtp.problems, "solved", lambda problem, text: text == said[problem])
    plain, lookup, verify, static = mtp.mtp(engine, asked, questions, compared, sequences=3, repeat=2)
    assert [row.accuracy for row in (plain, lookup, verify)] == [1, 1, 1]
    assert static.accuracy == static.same < 1
    assert static.lost == pytest.approx(1 - static.same)
    assert static.lost_error == pytest.approx(math.sqrt(static.same * (1 - static.same) / 4))


def test_a_model_of_one_token_at_a_time(folders):
    with Engine(str(folders[1]), threads=2) as plain, pytest.raises(InvalidRequest, match="one token at a time") as refusal:
        sides(plain, [0.9], [2], 4)
    assert refusal.value.field == "model"


def test_problems_that_do_not_fit(engine):
    long = Problem("Why? " * 100, "", Decimal(1))
    kept, questions = as_questions(engine, [long, *arithmetic(1, 0, TEST)], 12)
    assert len(kept) == len(questions) == 1
    with pytest.raises(InvalidRequest, match="None of 1"):
        as_questions(engine, [long], 12)


# -- what one may say of it -------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 1000), data=st.data())
def test_wilson(count, data):
    """Its ends are the probabilities from which the share is 1.96 standard deviations away."""
    share = data.draw(st.integers(0, count)) / count
    low, high = wilson(share, count)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if 1e-6 < end < 1 - 1e-6:
            assert abs(share - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / count), rel=1e-6)


def test_mean():
    middle, error = mean([1.0, 0.0, 0.0, 1.0])
    assert (middle, error) == (0.5, pytest.approx(math.sqrt(1 / 3) / 2))
    assert mean([2.0, 2.0]) == (2.0, 0.0)
    assert math.isnan(mean([3.0])[1])


# -- the command line -------------------------------------------------------------------------------------------------------


@pytest.fixture
def invoke(folders, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments, model=folders[0]):
        fixed = ("--kv-device", "4MiB", "--threads", "2", "--output-tokens", "8", "--mtp-tokens", "4")
        return CliRunner().invoke(app, ["bench", "mtp", str(model), *fixed, *arguments])

    return run


def test_documents_and_tables(invoke, tmp_path):
    file, asked = tmp_path / "found.json", tmp_path / "test.jsonl"
    lines = [{"question": "How many? " * n, "answer": "#### 8"} for n in (1, 100, 2)]
    asked.write_text("\n".join(map(json.dumps, lines)))
    settings = ("--tau", "0.5, 0.9", "--static", "2", "--concurrency", "1,2", "--limit", "3")
    result = invoke("--file", str(asked), "--json", str(file), *settings)
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert (document["benchmark"], document["file"], document["left_out"]) == ("mtp", "test.jsonl", 1)
    rows = document["rows"]
    assert [(row["side"], row["setting"]) for row in rows[:6]] == [
        *((name, None) for name in ("plain", "lookup", "verify")), ("confadapt", 0.5), ("confadapt", 0.9), ("static", 2),
    ]  # fmt: skip
    assert [row["sequences"] for row in rows] == [1] * 6 + [2] * 6
    assert {row["problems"] for row in rows} == {2}
    assert "confadapt 0.9" in result.stdout
    assert "1 problem" in result.stderr


def test_made_up_problems(invoke):
    result = invoke("--limit", "1", "--tau", "1", "--static", "2", "--concurrency", "1", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["file"], document["left_out"], len(document["rows"])) == (None, 0, 5)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--tau", "0.5,2"), 2, "numbers from 0 to 1"),
        (("--tau", "nan"), 2, "numbers from 0 to 1"),
        (("--tau", ""), 2, "numbers from 0 to 1"),
        (("--static", "0"), 2, "whole numbers"),
        (("--static", "9"), 1, "at most 8 tokens"),
        (("--mtp-tokens", "9"), 1, "at most 8 tokens"),
        (("--concurrency", "1,x"), 2, "whole numbers"),
        (("--concurrency", "300", "--limit", "1"), 1, "sequences"),
        (("--file", "/nowhere"), 1, "cannot be read"),
        (("--json", "/nowhere/at/all.json"), 1, "cannot be written"),
    ],
)
def test_refusals(invoke, arguments, status, message):
    result = invoke(*arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert not result.stdout


def test_a_model_that_cannot(invoke, folders):
    result = invoke("--limit", "1", model=folders[1])
    assert result.exit_code == 1
    assert "obole distill" in result.stderr
