"""How an answer ends, and what is booked for it."""

from __future__ import annotations

import pytest

from obole.config import SchedulerConfig
from obole.scheduler.receipt import receipt
from obole.types import FinishReason, Sequence, StepResult, TokenLogprob
from tests.fakes.driver import Driver

EOS = 99


class StopAfter:
    """A text tracker whose stop string is complete with the given token."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.pushed: list[int] = []

    def push(self, token_id: int, *, stops: bool) -> bool:
        self.pushed.append(token_id)
        return stops and token_id == self.last

    def take(self) -> str:
        return ""

    def flush(self) -> None:
        pass


def answer(new: list[list[int]], *, text: StopAfter | None = None, **params: object) -> Sequence:
    """Let a model answer a prompt of 10 tokens with the given tokens, step by step; several in a step, as with drafts."""
    driver = Driver()
    [seq] = driver.add("a", range(10), eos=(EOS,), text=text, **params)
    scheduler = driver.scheduler
    for tokens in new:
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        logprobs = [TokenLogprob(token, -1.0) for token in tokens]
        [event] = scheduler.settle(plan, StepResult([tokens], [logprobs], [None]), 1.0)
        assert event.finish_reason is seq.finish_reason
        assert event.token_ids == tuple(seq.output_ids[-len(event.token_ids) :])
        scheduler.check()
    return seq


def test_the_end_of_sequence_ends_and_stays_out_of_the_text():
    text = StopAfter(-1)
    seq = answer([[5], [EOS], [6]], text=text)
    assert (seq.output_ids, seq.finish_reason) == ([5, EOS], FinishReason.STOP)
    assert text.pushed == [5]


def test_ignored_end_of_sequence_is_text_like_any_other():
    text = StopAfter(-1)
    seq = answer([[EOS], [6], [7]], text=text, ignore_eos=True, max_tokens=3)
    assert (seq.output_ids, seq.finish_reason) == ([EOS, 6, 7], FinishReason.LENGTH)
    assert text.pushed == [EOS, 6, 7]


def test_a_stop_token_of_the_request_ends_it():
    seq = answer([[5], [8]], stop_token_ids=(8,))
    assert (seq.output_ids, seq.finish_reason) == ([5, 8], FinishReason.STOP)


def test_a_stop_string_ends_it():
    seq = answer([[5], [6], [7]], text=StopAfter(6))
    assert (seq.output_ids, seq.finish_reason) == ([5, 6], FinishReason.STOP)


@pytest.mark.parametrize("stop", ["token", "string"])
def test_nothing_stops_before_min_tokens(stop):
    last = EOS if stop == "token" else 8
    text = StopAfter(-1 if stop == "token" else 8)
    seq = answer([[last], [last], [last], [5]], text=text, min_tokens=3)
    assert (seq.output_ids, seq.finish_reason) == ([last] * 3, FinishReason.STOP)


def test_max_tokens_ends_with_length_and_a_stop_on_the_last_token_wins():
    assert answer([[5], [6]], max_tokens=2).finish_reason is FinishReason.LENGTH
    assert answer([[5], [EOS]], max_tokens=2).finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("max_tokens", "kept", "reason"),
    [
        (2, [1, 2], FinishReason.LENGTH),
        (3, [1, 2, EOS], FinishReason.STOP),
        (4, [1, 2, EOS], FinishReason.STOP),
        (6, [1, 2, EOS], FinishReason.STOP),
    ],
)
def test_several_tokens_at_once_end_in_their_order(max_tokens, kept, reason):
    seq = answer([[1, 2, EOS, 4, 5, 6]], max_tokens=max_tokens, logprobs=0)
    assert (seq.output_ids, seq.finish_reason) == (kept, reason)
    assert [entry.token_id for entry in seq.logprobs] == kept


@pytest.mark.parametrize("place", range(6))
def test_a_stop_string_is_seen_at_every_place_of_several_tokens(place):
    text = StopAfter(place)
    seq = answer([[0, 1, 2, 3, 4, 5]], text=text, max_tokens=50)
    assert (seq.output_ids, seq.finish_reason) == (list(range(place + 1)), FinishReason.STOP)
    assert text.pushed == seq.output_ids


@pytest.mark.parametrize(("accepted", "computed"), [([5], 11), ([5, 6], 12), ([5, 6, 7, 8], 14)])
def test_rows_of_drafts_that_were_turned_down_do_not_count_as_computed(accepted, computed):
    driver = Driver()
    [seq] = driver.add("a", range(10))
    driver.step()
    plan = driver.scheduler.plan(1.0)
    plan.rows[0] = plan.total_rows = 4  # the newest token and three drafts
    driver.scheduler.settle(plan, StepResult([accepted], [None], [None]), 1.0)
    assert (len(seq.tokens), seq.num_computed) == (computed + 1, computed)


@pytest.mark.parametrize("scores", [None, 0])
def test_scoring_yields_no_token(scores):
    driver = Driver(config=SchedulerConfig(max_batch_tokens=16))
    [seq] = driver.add("a", range(40), max_tokens=0, prompt_logprobs=scores)
    events = driver.run()
    assert [(event.token_ids, event.finish_reason) for event in events] == [((), FinishReason.LENGTH)]
    assert seq.output_ids == []
    assert len(seq.prompt_logprobs) == (39 if scores == 0 else 0)
    bill = receipt(seq)
    assert (bill.output_tokens, bill.sources, bill.decode_seconds) == (0, {}, 0.0)


def test_weight_bytes_are_shared_by_rows_and_nothing_is_lost():
    driver = Driver()
    seqs = [driver.add(str(i), range(3 + i), max_tokens=5)[0] for i in range(3)]
    plan = driver.scheduler.plan(0.0)
    assert plan.rows == [3, 4, 5]
    driver.scheduler.settle(plan, StepResult([[1], [1], [1]], [None] * 3, [None] * 3, 1000, [7, 8, 9]), 0.0)
    shares = [seq.tally.weight_bytes for seq in seqs]
    assert shares == [250, 333, 417]
    assert [seq.tally.kv_bytes for seq in seqs] == [7, 8, 9]


def test_the_receipt_adds_up():
    driver = Driver(config=SchedulerConfig(max_batch_tokens=16))
    driver.add("other", range(100, 130), max_tokens=2)
    [seq] = driver.add("a", range(40), max_tokens=4)
    driver.run()
    bill = receipt(seq)
    assert (bill.prompt_tokens, bill.cached_tokens, bill.computed_tokens, bill.output_tokens) == (40, 0, 40, 4)
    assert bill.sources == {"model": 4}
    assert bill.queued_seconds == 1.0  # the first step was full
    assert bill.forward_passes == seq.tally.passes
    assert bill.total_seconds == bill.queued_seconds + bill.prefill_seconds + bill.decode_seconds == seq.tally.finished
    assert bill.decode_seconds == 3.0


def test_the_receipt_of_what_was_cancelled():
    driver = Driver()
    driver.add("queued", range(40))
    driver.add("running", range(40))
    queued, running = (driver.scheduler._waiting[i] for i in range(2))
    driver.scheduler.cancel("queued", 3.0)
    driver.time = 1.0
    driver.step()
    driver.scheduler.cancel("running", 4.0)
    bill = receipt(queued)
    assert (bill.queued_seconds, bill.prefill_seconds, bill.decode_seconds, bill.total_seconds) == (3.0, 0.0, 0.0, 3.0)
    bill = receipt(running)
    assert (bill.queued_seconds, bill.prefill_seconds, bill.decode_seconds, bill.total_seconds) == (1.0, 0.5, 2.5, 4.0)
    for seq in (queued, running):
        bill = receipt(seq)
        assert bill.cached_tokens + bill.computed_tokens + bill.unread_tokens == bill.prompt_tokens == 40


def test_no_receipt_before_the_end():
    driver = Driver()
    [seq] = driver.add("a", range(10))
    with pytest.raises(ValueError, match="not finished"):
        receipt(seq)
