"""Predicted outputs: the text that the caller expects back, wholly right, partly right, or not at all."""

from __future__ import annotations

import dataclasses
import random

import pytest

from exact.common import check_idle, fingerprints, random_prompt
from fakes.checkpoints import byte_vocabulary, chain, table_logits, write_puppet
from obole import Engine, SamplingParams
from obole.errors import InvalidRequest
from obole.speculate.controller import always
from obole.speculate.prediction import AT_START, Prediction
from obole.types import Sequence, Source
from tests.fakes.driver import make_seqs

TEXT = [5, 6, 7, 5, 6, 8, 5, 6, 9]


def sequence(*answer: int) -> Sequence:
    [seq] = make_seqs("x", [1, 2, 3])
    seq.tokens += answer
    return seq


def test_at_its_beginning_a_prediction_is_drafted_from_its_beginning():
    proposal = Prediction(tuple(TEXT)).propose(sequence(), 4)
    assert (proposal.source, proposal.length, proposal.sure) == (Source.PREDICTION, AT_START, 1.0)
    assert proposal.tokens == TEXT[:4]


@pytest.mark.parametrize("done", range(1, 9))
@pytest.mark.parametrize("step", [1, 2, 3])
def test_as_long_as_the_answer_follows_the_place_counts(done, step):
    """5 6 comes three times: what is drafted is what follows here, not what followed the last time."""
    prediction = Prediction(tuple(TEXT))
    seq = sequence()
    for i in range(0, done, step):
        prediction.propose(seq, 4)
        seq.tokens += TEXT[i : min(i + step, done)]
    proposal = prediction.propose(seq, 4)
    assert proposal.tokens == TEXT[done : done + 4]
    assert proposal.length == AT_START + done


def test_the_prediction_ends_and_the_answer_does_not():
    prediction = Prediction((5, 6, 7))
    seq = sequence(5, 6, 7)
    assert prediction.propose(seq, 4) is None  # nothing follows a 7
    seq.tokens += [5]
    assert prediction.propose(seq, 4).tokens == [6, 7]  # but a 5


def test_it_finds_back_after_it_was_left():
    text = list(range(10, 30))
    prediction = Prediction(tuple(text))
    seq = sequence(*text[:5])
    assert prediction.propose(seq, 3).tokens == text[5:8]
    seq.tokens += [90, 91, 92]  # inserted
    assert prediction.propose(seq, 3) is None
    seq.tokens += [text[5]]
    assert prediction.propose(seq, 3).tokens == text[6:9]
    seq.tokens += [text[6], text[15], text[16]]  # a part left out
    proposal = prediction.propose(seq, 9)
    assert (proposal.tokens, proposal.length) == (text[17:], 2)


def test_an_answer_that_begins_otherwise():
    prediction = Prediction(tuple(TEXT))
    assert prediction.propose(sequence(99), 4) is None
    prediction = Prediction(tuple(TEXT))
    assert prediction.propose(sequence(8), 4).tokens == [5, 6, 9]


# -- in an engine ----------------------------------------------------------------------------------------------------------

START, END = 0, 257
LETTERS = b"ABCDEFGHIJKLMNOPQRST"


@pytest.fixture(scope="module")
def puppet(tmp_path_factory):
    vocabulary = len(byte_vocabulary())
    path = tmp_path_factory.mktemp("puppet") / "puppet.gguf"
    with Engine(write_puppet(path, table_logits(chain([START, *LETTERS], vocabulary, END))), draft_memory=0) as engine:
        engine._controller.lengths = always(8)
        yield engine
        check_idle(engine)


def details(result) -> tuple[int, int]:
    d = result.usage["completion_tokens_details"]
    return d["accepted_prediction_tokens"], d["rejected_prediction_tokens"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(
    ("prediction", "counts"),
    [
        # the model's own are A, J and S, each after a pass whose drafts were right, and the end after a T
        (LETTERS, (17, 0)),
        # nothing is expected from J on
        (LETTERS[:10], (8, 0)),
        # wrong from the second letter on: eight are drafted at A, and that is all
        (b"A" + b"z" * 30, (0, 8)),
        # one letter wrong: the model says B and C itself, then D to K and M to T are drafted
        (b"AzCDEFGHIJKLMNOPQRST", (16, 8)),
        (b"zzzz", (0, 0)),
        (b"", (0, 0)),
    ],
)
def test_what_is_confirmed_and_what_is_not_is_counted(puppet, prediction, counts, as_ids):
    value = tuple(prediction) if as_ids else prediction.decode()
    params = SamplingParams(prediction=value, speculate="prediction", logprobs=2)
    (on,) = puppet.generate([START], params)
    (off,) = puppet.generate([START], dataclasses.replace(params, speculate="off"))
    assert on.text == LETTERS.decode()
    assert fingerprints([on]) == fingerprints([off])
    assert details(off) == (0, 0)
    accepted, rejected = details(on)
    assert (accepted, rejected) == counts
    assert accepted == on.receipt.sources.get("prediction", 0)
    assert accepted + rejected == on.receipt.drafted.get("prediction", 0)
    assert on.usage["completion_tokens"] == len(LETTERS) + 1


def test_choices_are_counted_together(puppet):
    (result,) = puppet.generate([START], SamplingParams(prediction=LETTERS.decode(), n=3, speculate="prediction"))
    assert details(result) == (3 * 17, 0)


@pytest.mark.parametrize("prediction", [(-1,), (2**31,), (True,), (1.5,), ("a",), 5, b"ab"])
def test_what_is_no_prediction_is_refused(prediction):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(prediction=prediction)
    assert error.value.field == "prediction"


def test_ids_beyond_the_vocabulary_are_refused(puppet):
    with pytest.raises(InvalidRequest) as error:
        puppet.generate([START], SamplingParams(prediction=(260,)))
    assert error.value.field == "prediction"


def test_text_is_refused_where_there_is_no_tokenizer(tiny_engine):
    with pytest.raises(InvalidRequest, match="token ids") as error:
        tiny_engine("llama").generate([5], SamplingParams(prediction="text"))
    assert error.value.field == "prediction"


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_predictions_right_diverging_and_mad_change_nothing(tiny_engine, arch):
    engine = tiny_engine(arch, speculate="prediction", prefix_cache=False)
    engine._controller.lengths = always(7)
    rng = random.Random(1)
    prompt = random_prompt(rng, 30, 128)
    params = SamplingParams(max_tokens=50, temperature=0.8, seed=3, logprobs=3, ignore_eos=True)
    (expected,) = engine.generate(prompt, params)
    right = expected.token_ids
    cases = {
        "right": right,
        "longer": (*right, *right),
        "beginning": right[:20],
        "end": right[30:],
        "inserted": (*right[:20], 3, 4, 5, *right[20:]),
        "left out": (*right[:20], *right[25:]),
        "changed": (*right[:20], right[20] ^ 1, *right[21:]),
        "reversed": right[::-1],
        "one token": right[1:2],
        "of another": tuple(random_prompt(rng, 50, 128)),
        "empty": (),
    }
    accepted = {}
    for name, prediction in cases.items():
        (result,) = engine.generate(prompt, dataclasses.replace(params, prediction=prediction))
        assert fingerprints([result]) == fingerprints([expected]), name
        accepted[name] = details(result)[0]
    assert accepted["right"] == accepted["longer"] == 42  # one less than each of eight passes yields
    assert accepted["beginning"] >= 16
    assert min(accepted["inserted"], accepted["left out"], accepted["changed"]) >= 30
    assert accepted["empty"] == 0
    check_idle(engine)
