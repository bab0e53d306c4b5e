"""Stopping inside a draft, with exact answers: the puppet model says its walk, and the drafts say it before."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from exact.common import check_idle, fingerprints
from fakes.checkpoints import byte_vocabulary, chain, table_logits, write_puppet
from fakes.drafters import Says, inject
from obole import Engine, SamplingParams
from obole.speculate.controller import always
from obole.speculate.proposal import Proposal
from obole.types import FinishReason, Source

VOCAB = len(byte_vocabulary())
START, END, TURN = 0, 257, 259
WALK = b"ABCDEFGHIJKLMNOP"
OFF = "off"


@pytest.fixture(scope="module")
def open_puppet(tmp_path_factory):
    """Engines on puppets, one for each table, drafting 8 tokens whenever there are any to draft."""
    folder = tmp_path_factory.mktemp("puppets")
    numbers = itertools.count()
    engines: dict[object, Engine] = {}

    def opened(walk, *, end: int = END, after: dict[int, int] | None = None, **settings: object) -> Engine:
        key = (tuple(walk), end, tuple((after or {}).items()), tuple(settings.items()))
        if key not in engines:
            table = chain([START, *walk], VOCAB, end)
            for before, token in (after or {}).items():
                table[before] = token
            path = write_puppet(folder / f"{next(numbers)}.gguf", table_logits(table))
            engines[key] = Engine(path, draft_memory=0, **settings)
        engines[key]._controller.lengths = always(8)
        return engines[key]

    yield opened
    for engine in engines.values():
        check_idle(engine)
        engine.close()


def ask(engine: Engine, prompt: list[int], **params: object):
    """The answer with drafts, after checking that it is the one without, streamed or not, with or without logprobs."""
    wanted = SamplingParams(**params)
    plain = dataclasses.replace(wanted, speculate=OFF)
    results = []
    for logprobs in (None, 3):
        (off,) = engine.generate(prompt, dataclasses.replace(plain, logprobs=logprobs))
        (on,) = engine.generate(prompt, dataclasses.replace(wanted, logprobs=logprobs))
        deltas = list(engine.stream(prompt, dataclasses.replace(wanted, logprobs=logprobs)))
        assert set(off.receipt.sources) <= {"model"}
        assert off.receipt.drafted == {}
        assert fingerprints([on, deltas[-1].result]) == fingerprints([off, off])
        for result in (on, deltas[-1].result):
            assert counts(result) == counts(off)
            assert result.usage["completion_tokens"] == len(result.token_ids)
            choice = result.choices[0]
            assert logprobs is None or [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
            bill = result.receipt
            assert sum(bill.sources.values()) == bill.output_tokens == len(result.token_ids)
            assert {s: bill.drafted[s] - bill.rejected[s] for s in bill.drafted} == {
                s: bill.sources.get(s, 0) for s in bill.drafted
            }
        assert "".join(d.text for d in deltas) == off.text
        assert [d.text.encode().decode() for d in deltas] == [d.text for d in deltas]
        assert tuple(t for d in deltas for t in d.token_ids) == off.token_ids
        assert [len(d.sources) for d in deltas] == [len(d.token_ids) for d in deltas]
        assert logprobs is None or tuple(p for d in deltas for p in d.logprobs or ()) == deltas[-1].result.choices[0].logprobs
        assert [d.finish_reason for d in deltas if d.finish_reason] == [off.finish_reason]
        results.append(on)
    assert results[0].receipt.sources == results[1].receipt.sources
    return results[1]


def counts(result) -> tuple[int, ...]:
    return tuple(result.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))


SOURCES = ("lookup", "prediction")


def drafting(source: str, walk: list[int]) -> tuple[list[int], dict[str, object]]:
    """A prompt whose answer is the walk, and params by which the source drafts all of it from the second token on."""
    if source == "lookup":
        return [START, *walk, START], {"speculate": "lookup"}
    return [5, START], {"speculate": "prediction", "prediction": tuple(walk)}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_string_completed_at_each_place_of_a_draft(open_puppet, source, place, length):
    engine = open_puppet(WALK)
    prompt, params = drafting(source, list(WALK))
    end = place + 1  # A comes from the prompt's own pass
    stop = WALK[max(0, end - length) : end].decode()
    result = ask(engine, prompt, stop=stop, max_tokens=14, **params)
    assert result.text == WALK[: max(0, end - length)].decode()
    assert result.token_ids == tuple(WALK[:end])
    assert result.finish_reason is FinishReason.STOP
    assert result.receipt.sources == {"model": 1, source: place}
    assert result.receipt.drafted == {source: 8}
    assert result.receipt.rejected == {source: 8 - place}
    assert (result.receipt.forward_passes, result.receipt.draftless_passes) == (2, 1)


@pytest.mark.parametrize("place", range(9, 16))
def test_a_stop_string_over_the_edge_of_two_drafts(open_puppet, place):
    engine = open_puppet(WALK)
    prompt, params = drafting("lookup", list(WALK))
    stop = WALK[7 : place + 1].decode()  # begins in the first draft; the token of its end is the bonus or in the second one
    result = ask(engine, prompt, stop=stop, max_tokens=20, **params)
    assert (result.text, result.finish_reason) == (WALK[:7].decode(), FinishReason.STOP)
    assert result.token_ids == tuple(WALK[: place + 1])
    # one token of each pass is nobody's draft: A, J after eight drafted ones; the last one of the answer is a draft
    assert result.receipt.sources == {"model": 1 if place == 8 else 2, "lookup": place - 1}


T = [10, 11, END, 12, 13, 14]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("drafted", [1, 2, 3, 6])
@pytest.mark.parametrize("limit", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["eos", "token", "string"])
def test_what_ends_within_the_limit_comes_before_it(open_puppet, source, drafted, limit, kind):
    ending = {"eos": END, "token": 100, "string": 100}[kind]
    walk = [10, 11, ending, 12, 13, 14]
    engine = open_puppet(walk, end=END, after={14: 14})
    engine._controller.lengths = always(drafted)
    prompt, params = drafting(source, walk)
    params |= {"token": {"stop_token_ids": (100,)}, "string": {"stop": "d"}}.get(kind, {})
    result = ask(engine, prompt, max_tokens=limit, **params)
    assert result.token_ids == (10, 11, ending)[:limit]
    assert result.finish_reason is (FinishReason.LENGTH if limit == 2 else FinishReason.STOP)
    assert result.text == "\n\x0b"
    expected = 0 if limit == 2 else 2 if drafted > 1 else 1  # a draft is never longer than what may still come, less one
    assert result.receipt.sources.get(source, 0) == min(expected, limit - 2)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("limit", [1, 2, 3, 8, 9, 10, 11, 18, 19])
def test_never_more_than_max_tokens(open_puppet, source, limit):
    engine = open_puppet(WALK, after={ord("P"): ord("A")})  # without end
    prompt, params = drafting(source, list(WALK) * 2)
    result = ask(engine, prompt, max_tokens=limit, **params)
    assert result.token_ids == tuple((WALK * 2)[:limit])
    assert result.finish_reason is FinishReason.LENGTH
    assert sum(result.receipt.drafted.values()) <= limit


@pytest.mark.parametrize("drafted", [1, 2, 5, 8])
@pytest.mark.parametrize("least", range(6))
def test_no_end_within_min_tokens_though_it_is_drafted(open_puppet, drafted, least):
    """The end is banned there; what is left are equal logits, of which the lowest id wins: the walk begins anew."""
    walk = [10, 11, END, 12]
    engine = open_puppet(walk)
    engine._controller.lengths = always(drafted)
    prompt, params = drafting("lookup", walk)
    result = ask(engine, prompt, min_tokens=least, max_tokens=12, **params)
    answer = (10, 11, END) if least < 3 else (10, 11, START, 10, 11, END)
    assert (result.token_ids, result.finish_reason) == (answer, FinishReason.STOP)


@pytest.mark.parametrize("least", range(10))
def test_a_stop_string_within_min_tokens_does_not_count_in_a_draft(open_puppet, least):
    engine = open_puppet(WALK)
    prompt, params = drafting("lookup", list(WALK))
    result = ask(engine, prompt, stop=["C", "F", "I"], min_tokens=least, max_tokens=16, **params)
    end = next(i for i in (3, 6, 9, 99) if i >= least)
    answer = tuple(WALK[:end]) if end < 99 else (*WALK[:16],)
    assert result.token_ids == answer
    assert result.text == WALK[: len(answer) - (end < 99)].decode()


@pytest.mark.parametrize("room", range(1, 13))
def test_the_end_of_the_context_inside_a_draft(open_puppet, room):
    engine = open_puppet(WALK, after={ord("P"): ord("A")}, max_context=64)
    prompt = [*[5] * (64 - room - 18), START, *WALK, START]
    assert len(prompt) == 64 - room
    result = ask(engine, prompt)
    assert result.token_ids == tuple(WALK[:room])
    assert result.finish_reason is FinishReason.LENGTH


def test_the_end_of_the_pool_inside_a_draft(open_puppet):
    engine = open_puppet(WALK, after={ord("P"): ord("A")}, kv_device=4 * 16 * 1024)
    assert engine.max_context == 65  # of four blocks; the newest token is not computed
    result = ask(engine, [START, *WALK, START])
    assert result.token_ids == tuple((WALK * 3)[: 65 - 18])
    assert result.finish_reason is FinishReason.LENGTH


def test_a_character_split_over_a_draft_arrives_whole(open_puppet):
    text = "aé🫠é".replace("é🫠é", "é🫠")
    engine = open_puppet(text.encode())
    for drafted in range(1, 9):
        engine._controller.lengths = always(drafted)
        prompt, params = drafting("lookup", [*text.encode(), END])
        result = ask(engine, prompt, max_tokens=20, **params)
        assert (result.text, result.finish_reason) == (text, FinishReason.STOP)


def test_a_tie_goes_to_the_lowest_id_and_a_draft_of_the_other_is_turned_down(tmp_path):
    table = table_logits(chain([START, *b"ABCDEFGH"], VOCAB, END))
    for token in b"ABCDEFGH":
        table[:, token + 32] = table[:, token]  # "a" is as likely as "A" after everything
    with Engine(write_puppet(tmp_path / "tie.gguf", table), draft_memory=0) as engine:
        engine._controller.lengths = always(8)
        low, high = [*b"ABCDEFGH"], [*b"abcdefgh"]
        for walk, accepted in ((low, 7), (high, 0)):
            result = ask(engine, [5, START], prediction=tuple(walk), speculate="prediction", max_tokens=9)
            assert result.token_ids == (*low, END)
            assert result.receipt.sources.get("prediction", 0) == accepted
        first = result.choices[0].logprobs[0]
        assert [t for t, _ in first.top[:2]] == [ord("A"), ord("a")]
        assert first.top[0][1] == first.top[1][1]
        # sampled, either may come, but the same with drafts as without
        answers = {
            ask(engine, [5, START], prediction=tuple(high), temperature=1.0, seed=seed, max_tokens=9).text for seed in range(6)
        }
        assert len(answers) > 1


WRONG = [66, 66, 66]
NONSENSE = {
    "negative": Proposal(Source.LOOKUP, 5, 1.0, [-1, 65]),
    "negative later": Proposal(Source.LOOKUP, 5, 1.0, [66, -1, 67]),
    "beyond the vocabulary": Proposal(Source.LOOKUP, 5, 1.0, [VOCAB]),
    "beyond 32 bits": Proposal(Source.LOOKUP, 5, 1.0, [2**31, 2**63, 2**200]),
    "huge later": Proposal(Source.LOOKUP, 5, 1.0, [66, 2**63]),
    "empty": Proposal(Source.LOOKUP, 5, 1.0, []),
    "longer than the context": Proposal(Source.LOOKUP, 5, 1.0, [66] * 10_000),
    "no match": Proposal(Source.LOOKUP, 0, 1.0, WRONG),
    "a match of negative length": Proposal(Source.LOOKUP, -3, 1.0, WRONG),
    "a match of enormous length": Proposal(Source.LOOKUP, 10**12, 1.0, WRONG),
    "more than sure": Proposal(Source.LOOKUP, 5, 7.0, WRONG),
    "less than unsure": Proposal(Source.LOOKUP, 5, -1.0, WRONG),
    "no number": Proposal(Source.LOOKUP, 5, float("nan"), WRONG),
    "infinitely sure": Proposal(Source.LOOKUP, 5, float("inf"), WRONG),
    "forced, but nothing is": Proposal(Source.FORCED, 64, 1.0, WRONG),
    "control tokens": Proposal(Source.LOOKUP, 5, 1.0, [END, TURN, 258]),
    "none": None,
}


@pytest.mark.parametrize("length", ["by cost", -1, 0, 1, 8, 10**9])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_from_a_drafter_changes_nothing(open_puppet, name, length):
    engine = open_puppet(WALK, max_context=128, draft_memory_seconds=1)  # an engine of its own: the controller is replaced
    said = NONSENSE[name]
    by_cost = type(engine._controller).__dataclass_fields__["lengths"].default_factory()
    inject(engine, lambda _: Says(lambda *_: said and dataclasses.replace(said)), 0)
    engine._controller.lengths = by_cost if length == "by cost" else always(length)
    (on,) = engine.generate([5] * 100 + [START], SamplingParams(max_tokens=20, logprobs=2))
    (off,) = engine.generate([5] * 100 + [START], SamplingParams(max_tokens=20, logprobs=2, speculate=OFF))
    assert on.text == WALK.decode()
    assert fingerprints([on]) == fingerprints([off])
    assert sum(on.receipt.sources.values()) == len(WALK) + 1
    drafted, right = sum(on.receipt.drafted.values()), len(on.token_ids) - on.receipt.sources["model"]
    assert right == sum(on.receipt.drafted.values()) - sum(on.receipt.rejected.values())
    assert right <= 2  # "B" after "A", and the end
    assert drafted <= 18 * 64
    check_idle(engine)
