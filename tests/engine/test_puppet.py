"""Exact answers from the puppet model (next token = table[last token]): stopping, text, lengths, counts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from fakes.checkpoints import byte_vocabulary, chain, table_logits, write_puppet
from obole import Engine, SamplingParams
from obole.errors import InvalidRequest, ModelError
from obole.types import FinishReason

VOCAB = len(byte_vocabulary())
START, END, TURN = 0, 257, 259  # a byte that begins each walk; <|endoftext|>; <|im_end|>

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def puppet(folder: Path, walk: bytes | list[int], *, end: int = END, **settings: object) -> Engine:
    tokens = [START, *walk]
    logits = table_logits(chain(tokens, VOCAB, end))
    return Engine(write_puppet(folder / "puppet.gguf", logits, chat_template=TEMPLATE), kernels="reference", **settings)


def streamed(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[str, list[str]]:
    deltas = list(engine.stream(prompt, params))
    return "".join(d.text for d in deltas), [d.text for d in deltas]


def both_ways(engine: Engine, params: SamplingParams, prompt: list[int] | None = None):
    """The result, after checking that the stream says the same. Without drafts, so that every token is a delta."""
    params = dataclasses.replace(params, speculate="off")
    prompt = prompt or [START]
    (result,) = engine.generate(prompt, params)
    text, deltas = streamed(engine, prompt, params)
    assert text == result.text
    assert all(d.encode().decode() == d for d in deltas)
    return result, deltas


@pytest.mark.parametrize("text", ["ď 🫠", "🥹龜", "né ش", "👩‍x"])
def test_characters_split_over_tokens_arrive_whole(tmp_path, text):  # B01
    engine = puppet(tmp_path, text.encode())
    result, deltas = both_ways(engine, SamplingParams())
    assert result.text == text
    assert "�" not in "".join(deltas)
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == (*text.encode(), END)
    assert result.usage["completion_tokens"] == len(text.encode()) + 1


def test_a_cut_in_the_middle_of_a_character_is_one_replacement_both_ways(tmp_path):  # B01
    engine = puppet(tmp_path, "a🫠".encode())
    for length in (2, 3, 4):
        result, _ = both_ways(engine, SamplingParams(max_tokens=length))
        assert result.text == "a�"
        assert result.finish_reason is FinishReason.LENGTH


def test_an_invalid_byte_is_one_replacement_and_text_goes_on(tmp_path):  # B01
    result, _ = both_ways(puppet(tmp_path, b"\xffabc"), SamplingParams())
    assert result.text == "�abc"


def test_a_prompt_that_ends_in_the_middle_of_a_character_does_not_leak(tmp_path):  # B02
    engine = puppet(tmp_path, b"xyz")
    prompt = [*b"the prompt ", 0xF0, 0x9F, START]
    result, deltas = both_ways(engine, SamplingParams(max_tokens=3), prompt)
    assert result.text == "xyz"
    assert deltas[0] == "x"


ALPHABET = b"ABCDEFGHIJKLMNOP"


def test_a_stop_string_is_cut_off_and_nothing_of_it_leaks(tmp_path):  # B03
    engine = puppet(tmp_path, ALPHABET)
    result, _ = both_ways(engine, SamplingParams(stop="DEFGHIJ"))
    assert (result.text, result.finish_reason) == ("ABC", FinishReason.STOP)
    assert result.usage["completion_tokens"] == 10  # up to and with the token that completed the match


def test_a_stop_string_that_never_completes_loses_nothing(tmp_path):  # B03
    result, deltas = both_ways(puppet(tmp_path, ALPHABET), SamplingParams(stop="DEFGHIX"))
    assert result.text == ALPHABET.decode()
    assert deltas[2:8] == ["C", "", "", "", "", ""]  # held back while it may still become the stop string


def test_a_stop_string_that_cannot_begin_holds_nothing_back(tmp_path):  # B03
    _, deltas = both_ways(puppet(tmp_path, ALPHABET), SamplingParams(stop="z" * 200))
    assert deltas[:3] == ["A", "B", "C"]


@pytest.mark.parametrize(("stop", "text"), [("Pari", " "), ("ris\tF", " Pa"), ("s", " Pari"), ("is\tFn", " Par")])
def test_stops_do_not_need_to_line_up_with_tokens(tmp_path, stop, text):  # B04
    result, _ = both_ways(puppet(tmp_path, b" Paris\tFnce"), SamplingParams(stop=stop))
    assert (result.text, result.finish_reason) == (text, FinishReason.STOP)


def test_the_length_limit_and_the_end_of_sequence(tmp_path):  # B08, without drafts
    engine = puppet(tmp_path, [10, 11])
    for limit, reason in ((1, FinishReason.LENGTH), (2, FinishReason.LENGTH), (3, FinishReason.STOP), (9, FinishReason.STOP)):
        result, _ = both_ways(engine, SamplingParams(max_tokens=limit, logprobs=2))
        expected = (10, 11, END)[:limit]
        assert (result.token_ids, result.finish_reason) == (expected, reason)
        assert len(result.choices[0].logprobs) == len(expected) == result.usage["completion_tokens"]


@pytest.mark.parametrize("end", [END, TURN])
def test_every_end_of_sequence_token_ends(tmp_path, end):
    result, _ = both_ways(puppet(tmp_path, b"ab", end=end), SamplingParams(max_tokens=9))
    assert result.token_ids == (*b"ab", end)
    assert result.text == "ab"


def test_stop_token_ids_end_too(tmp_path):
    result, _ = both_ways(puppet(tmp_path, b"abcdef"), SamplingParams(stop_token_ids=(ord("c"),)))
    assert (result.token_ids, result.text, result.finish_reason) == (tuple(b"abc"), "ab", FinishReason.STOP)


def test_ignore_eos_goes_on_and_min_tokens_bans_the_end(tmp_path):
    engine = puppet(tmp_path, b"ab")
    result, _ = both_ways(engine, SamplingParams(max_tokens=6, ignore_eos=True))
    assert result.token_ids[:4] == (*b"ab", END, END)  # the table's answer to the end is the end
    assert result.finish_reason is FinishReason.LENGTH
    result, _ = both_ways(engine, SamplingParams(max_tokens=6, min_tokens=4))
    assert END not in result.token_ids[:3]
    assert len(result.token_ids) >= 4


def test_a_stop_string_within_min_tokens_does_not_count(tmp_path):
    result, _ = both_ways(puppet(tmp_path, ALPHABET), SamplingParams(stop=["B", "F"], min_tokens=4))
    assert result.text == "ABCDE"


@pytest.mark.parametrize("value", [0, 1, 5])
def test_max_tokens(tmp_path, value):  # B38
    (result,) = puppet(tmp_path, ALPHABET).generate([START], SamplingParams(max_tokens=value))
    assert len(result.token_ids) == value
    assert result.finish_reason is FinishReason.LENGTH
    assert result.receipt.output_tokens == value


@pytest.mark.parametrize("value", [2**31 - 1, 2**63 - 1])
def test_huge_max_tokens_are_refused_with_the_number_that_fits(tmp_path, value):  # B38
    engine = puppet(tmp_path, ALPHABET)
    with pytest.raises(InvalidRequest, match=str(engine.max_context - 1)) as error:
        engine.generate([START], SamplingParams(max_tokens=value))
    assert error.value.field == "max_tokens"


def test_prompts_over_the_context_are_refused_not_cut(tmp_path):  # B36
    engine = puppet(tmp_path, ALPHABET, max_context=64)
    with pytest.raises(InvalidRequest, match="64"):
        engine.generate([START] * 64)
    (result,) = engine.generate([*[5] * 62, START])
    assert result.usage["prompt_tokens"] == 63
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == 1


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [[]],
        [""],
        ["a", ""],
        [-1],
        [[VOCAB]],
        [1.5],
        [True],
        [2**63],
        None,
        5,
        {"role": "user"},
        [["a"]],
        [{"role": "user"}, 3],
    ],
)
def test_bad_prompts_are_refused_and_nothing_is_left_behind(tmp_path, prompt):  # B19, B37
    engine = puppet(tmp_path, b"ok")
    with pytest.raises(InvalidRequest):
        engine.generate(prompt)
    engine._scheduler.check()
    assert not engine._scheduler.has_work
    assert engine.generate([START])[0].text == "ok"


def test_no_prompts_at_all_are_no_results(tmp_path):
    assert puppet(tmp_path, b"ok").generate([]) == []


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused_by_field(tmp_path, field):  # B19
    value = {VOCAB: 5.0} if field == "logit_bias" else (VOCAB,)
    with pytest.raises(InvalidRequest) as error:
        puppet(tmp_path, b"ok").generate([START], SamplingParams(**{field: value}))
    assert error.value.field == field


def test_logprobs_are_finite_even_where_filters_leave_one_token(tmp_path):  # B18
    params = SamplingParams(temperature=1.0, top_k=1, logprobs=5, prompt_logprobs=5, logit_bias={10: -100.0}, max_tokens=4)
    (result,) = puppet(tmp_path, b"abc").generate([5, 6, START], params)
    entries = [*result.choices[0].logprobs, *result.prompt_logprobs[1:]]
    assert result.prompt_logprobs[0] is None
    assert len(entries) == 4 + 2
    for entry in entries:
        assert math.isfinite(entry.logprob)
        assert all(math.isfinite(p) for _, p in entry.top)
        assert sum(math.exp(p) for _, p in entry.top) <= 1 + 1e-6


def test_chat_messages_go_through_the_template(tmp_path):
    engine = puppet(tmp_path, b"ok")
    (result,) = engine.generate([{"role": "user", "content": "hi\x00"}])
    assert result.prompt_ids == (*b"hi", START)
    assert result.text == "ok"


def test_closing_a_stream_cancels_and_keeps_what_there_is(tmp_path):  # B31
    engine = puppet(tmp_path, ALPHABET)
    stream = engine.stream([START])
    first = [next(stream).text for _ in range(3)]
    stream.close()
    assert first == ["A", "B", "C"]
    assert stream.result.text == "ABC"
    assert stream.result.finish_reason is FinishReason.CANCELLED
    assert list(stream) == [] or next(stream, None) is None
    engine._scheduler.check()
    assert not engine._scheduler.has_work


def test_a_stream_never_read_holds_nothing(tmp_path):
    engine = puppet(tmp_path, ALPHABET)
    engine.stream([START])  # dropped at once
    engine.generate([START])
    assert not engine._scheduler.has_work
    engine._scheduler.check()


def test_cancelling_from_anywhere_takes_effect_before_the_next_step(tmp_path):
    engine = puppet(tmp_path, ALPHABET)
    stream = engine.stream([START])
    next(stream)
    stream.cancel()
    assert [d.finish_reason for d in stream] == [FinishReason.CANCELLED]
    assert stream.result.text == "A"


def test_a_closed_engine_refuses(tmp_path):
    engine = puppet(tmp_path, b"ok")
    engine.close()
    with pytest.raises(InvalidRequest, match="closed"):
        engine.generate([START])


@pytest.mark.parametrize("tenant", [None, 1, {1}, b"x"])
def test_a_tenant_is_text(tmp_path, tenant):
    with pytest.raises(InvalidRequest) as error:
        puppet(tmp_path, b"ok").generate([START], tenant=tenant)
    assert error.value.field == "tenant"


def test_min_tokens_that_cannot_be_reached_are_refused(tmp_path):
    with pytest.raises(InvalidRequest) as error:
        puppet(tmp_path, b"ok", max_context=64).generate([START], SamplingParams(min_tokens=10**9))
    assert error.value.field == "min_tokens"


def test_a_cancelled_prompt_is_charged_for_what_was_read(tmp_path):
    engine = puppet(tmp_path, ALPHABET, max_batch_tokens=32)
    stream = engine.stream([*[5] * 99, START])
    engine._step()
    stream.close()
    bill = stream.result.receipt
    assert (bill.cached_tokens, bill.computed_tokens, bill.unread_tokens, bill.forward_passes) == (0, 32, 68, 1)


def test_weights_that_yield_no_numbers_are_said_so(tmp_path):
    logits = table_logits(chain([START, 1, 2], VOCAB, END))
    logits[1] = float("nan")
    engine = Engine(write_puppet(tmp_path / "nan.gguf", logits))
    with pytest.raises(ModelError, match="damaged"):
        engine.generate([START])
    assert not engine._scheduler.has_work


def test_bytes_are_not_token_ids(tmp_path):
    for prompt in (b"hello", bytearray(b"hello"), [b"hello"]):
        with pytest.raises(InvalidRequest):
            puppet(tmp_path, b"ok").generate(prompt)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failing_step_loses_nothing_but_its_requests(tmp_path, monkeypatch, error):
    engine = puppet(tmp_path, b"ok")

    def fail(*_):
        raise error

    stream = engine.stream([START])
    with monkeypatch.context() as patched:
        patched.setattr(type(engine._runner), "run", fail)
        with pytest.raises(error):
            engine.generate([START])
    assert [d.finish_reason for d in stream] == [FinishReason.CANCELLED]
    assert stream.result.text == ""
    engine._scheduler.check()
    assert not engine._scheduler.has_work
    assert engine.generate([START])[0].text == "ok"


def test_receipts_add_up(tmp_path):  # invariant 7
    engine = puppet(tmp_path, ALPHABET, max_batch_tokens=16)
    prompts = [[*range(1, 40), START], [*range(1, 40), 50, START], [START]]
    for result in engine.generate(prompts, SamplingParams(n=2, seed=1)):
        for choice in result.choices:
            r = choice.receipt
            assert r.cached_tokens + r.computed_tokens + r.unread_tokens == r.prompt_tokens == len(result.prompt_ids)
            assert sum(r.sources.values()) == r.output_tokens == len(choice.token_ids)
            assert r.queued_seconds + r.prefill_seconds + r.decode_seconds == pytest.approx(r.total_seconds, abs=1e-12)
            assert min(r.queued_seconds, r.prefill_seconds, r.decode_seconds) >= 0
            assert r.weight_bytes > 0
            assert r.kv_bytes > 0
            assert r.forward_passes >= r.sources["model"]
            assert {name: r.drafted[name] - r.rejected[name] for name in r.drafted} == {
                name: r.sources.get(name, 0) for name in r.drafted
            }
