"""The observer of the network: what its classifier sees, and what it does not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fakes.talking import write_talking
from obole.bench.processes import free_address, obole_command, serving
from obole.bench.secrets import QUESTIONS, questions
from obole.cli.commands import app
from obole.economics.leak import auc, chance, features, fit, folds_of, told_apart


def stream(draws: np.random.Generator, count: int, size: float, gap: float):
    times = np.cumsum(draws.exponential(gap, count))
    return [(float(at), int(size + draws.integers(20))) for at in times]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=30), st.data())
def test_auc_is_the_share_of_pairs_in_the_right_order(scores, data):
    labels = data.draw(
        st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)).filter(lambda drawn: len(set(drawn)) == 2)
    )
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a, p in zip(scores, labels, strict=True)
        if p
        for b, q in zip(scores, labels, strict=True)
        if not q
    ]
    found = auc(np.array(scores, float), np.array(labels, float))
    assert found == pytest.approx(sum(pairs) / len(pairs))
    assert auc(-np.array(scores, float), np.array(labels, float)) == pytest.approx(1 - found)


def test_the_fit_is_where_the_slope_is_zero():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(60, 3))
    labels = (x @ [2.0, -1.0, 0.0] + draws.normal(size=60) > 0.5).astype(float)
    weights = fit(x, labels)
    likely = 1 / (1 + np.exp(-(x @ weights[:3] + weights[3])))
    assert x.T @ (likely - labels) + weights[:3] == pytest.approx(np.zeros(3), abs=1e-6)
    assert (likely - labels).sum() == pytest.approx(0, abs=1e-4)
    assert weights[0] > 0.5 > 0 > weights[1]


@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 99))
def test_folds_hold_out_every_stream_as_often_and_both_labels_each_time(ones, zeros, seed):
    labels = np.array([1.0] * ones + [0.0] * zeros)
    masks = folds_of(labels, seed)
    assert np.unique(np.sum(masks, axis=0)).tolist() == [5]
    for mask in masks:
        assert set(labels[mask]) == {0.0, 1.0} == set(labels[~mask])


def test_streams_that_differ_are_told_apart_and_others_are_not():
    draws = np.random.default_rng(1)
    same = [stream(draws, 24, 200, 0.01) for _ in range(60)]
    labels = [i % 2 for i in range(60)]
    assert 0.3 < told_apart(same, labels) < 0.7
    copied = [stream(draws, 8 if label else 24, 200, 0.01) for label in labels]
    assert told_apart(copied, labels) > 0.99
    slow = [stream(draws, 24, 200, 0.02 if label else 0.01) for label in labels]
    assert told_apart(slow, labels) > 0.9
    topics = [stream(draws, 10 + 5 * (i % 4), 200, 0.01) for i in range(60)]
    assert told_apart(topics, [i % 4 for i in range(60)]) > 0.7  # those in the middle are no half-space


def test_equal_streams_give_a_half():
    one = [(0.1, 1024), (0.2, 1024), (0.3, 1024)]
    assert told_apart([one] * 20, [0, 1] * 10) == 0.5
    assert np.isfinite(features([(0.0, 5)])).all()


def test_chance_shrinks_with_the_number_of_streams():
    assert chance(8, 8) > chance(30, 30) > chance(200, 200) > 0.5
    assert chance(8, 8) == pytest.approx(0.75, abs=0.04)


def test_secrets_of_a_question_differ_in_one_thing():
    for name in QUESTIONS:
        [one] = questions([name], 4, 0, {"pace": 5})
        labels = [secret.label for secret in one.secrets]
        assert len({labels.count(label) for label in labels}) == 1
        assert all(secret.fields == {"pace": 5} for secret in one.secrets)
        assert one == questions([name], 4, 0, {"pace": 5})[0]
    [copied] = questions(["copied"], 4, 0, {})
    assert {len(secret.messages) for secret in copied.secrets} == {3}
    [cached] = questions(["cached"], 4, 0, {})
    assert all(secret.first == bool(secret.label) for secret in cached.secrets)
    assert len({len(secret.messages[0]["content"].split()) for secret in cached.secrets}) == 1


def leak(*arguments: str):
    return CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["leak", *arguments])


def test_the_command(tmp_path):
    model, address = str(write_talking(tmp_path / "model.gguf", context=4096)), free_address()
    options = ("--kv-device", "8MiB", "--threads", "2")
    with serving(obole_command(model, address, options), address):
        few = ("--prompts", "4", "--output-tokens", "8", "--pace", "40", "--at-once", "8", "--question", "copied,topic")
        result = leak(address.url, *few, "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["question"] for row in document["rows"]] == ["copied or not", "topic"]
    for row in document["rows"]:
        assert row["streams"] == 8
        assert 0 <= row["auc_paced"] <= 1
        assert row["bytes_paced"] > 8 * 1024
        assert row["bytes_paced"] > row["bytes_unpaced"]
        assert row["first_token_paced_milliseconds"] > 900  # the next whole second


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--prompts", "3"), 1, "at least 4"),
        (("--pace", "0"), 1, "pace must be"),
        (("--question", "age"), 1, "'age'"),
        (("--threads", "2"), 2, "--threads"),
        (("--extra", "x"), 2, "JSON object"),
        ((), 1, "cannot be observed"),
    ],
)
def test_refusals(arguments, status, message):
    result = leak("http://127.0.0.1:9", *arguments)
    assert (result.exit_code, message in result.stderr) == (status, True), result.output
