"""The controller on a machine with a clock of its own: when it drafts, how much, and what it books."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from fakes.drafters import Automaton, Says, Scripted
from obole.costmodel import StepCost
from obole.speculate.acceptance import Counts, Kind
from obole.speculate.allowance import SHARE, START, affordable, prices
from obole.speculate.controller import Controller, Drafter, Speculation, Step, always
from obole.speculate.lookup import IndexStore, Lookup
from obole.speculate.memory import Memory, Recollection
from obole.speculate.prediction import Prediction
from obole.speculate.proposal import LONGEST_DRAFT, Proposal
from obole.types import Sequence, Source, StepPlan
from tests.fakes.driver import make_seqs

VOCAB = 50
ROWS = [1, 2, 4, 8, 16, 32, 64]
FREE = [1.0] * 7  # rows that cost nothing
LINEAR = [float(r) for r in ROWS]  # arithmetic is the limit from the first row on
CPU = [20.0, 20.6, 21.8, 24.5, 33.0, 58.0, 110.0]  # milliseconds of a small model on two cores


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now


def truth(seq: Sequence, position: int) -> int:
    return (position * position + 7 * seq.seed) % VOCAB


@dataclass
class World:
    """Sequences whose next token is known, steps that take what `seconds` says, and a controller that is told so."""

    seconds: list[float]
    make: Callable[[Sequence], Drafter] | None = None
    clock: Clock = field(default_factory=Clock)
    seqs: list[Sequence] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)  # tokens, in each step

    def __post_init__(self) -> None:
        self.truth = StepCost(list(ROWS), list(self.seconds))
        self.controller = Scripted(
            "off" if self.make is None else "auto",
            StepCost(list(ROWS), list(self.seconds)),
            vocab_size=VOCAB,
            memory=Memory(1 << 20, 1e9),
            store=IndexStore(1 << 20, 1e9),
            clock=self.clock,
            make=self.make,
        )

    def add(self, count: int, tokens: int, **params: object) -> list[Sequence]:
        """Decoding sequences that have their first token."""
        added = []
        for _ in range(count):
            [seq] = make_seqs(f"{len(self.seqs)}", [1, 2, 3], seed=len(self.seqs), limit=3 + tokens, **params)  # type: ignore[arg-type]
            seq.tokens.append(truth(seq, 3))
            seq.num_computed = 3
            added.append(seq)
            self.seqs.append(seq)
        return added

    def step(self) -> None:
        seqs = [seq for seq in self.seqs if len(seq.tokens) < seq.max_len]
        able = [seq for seq in seqs if len(seq.tokens) < seq.max_len - 1]
        self.controller.draft(able, len(seqs) - len(able))
        rows = [1 + (len(seq.draft.tokens) if seq.draft else 0) for seq in seqs]
        plan = StepPlan(seqs, [seq.num_computed for seq in seqs], rows, [True] * len(seqs), [], sum(rows))
        chosen = [self.verified(seq) for seq in seqs]
        seconds = self.truth.of(sum(rows), 0, 0)
        self.clock.now += seconds
        self.controller.observe(plan, chosen, seconds)
        self.drafted.append(sum(rows) - len(seqs))
        for seq, tokens in zip(seqs, chosen, strict=True):
            seq.tokens += tokens
            seq.num_computed = len(seq.tokens) - 1
            seq.draft = None
            assert len(seq.tokens) <= seq.max_len

    def verified(self, seq: Sequence) -> list[int]:
        new: list[int] = []
        for token in [*(seq.draft.tokens if seq.draft else ()), None]:
            new.append(truth(seq, len(seq.tokens) + len(new)))
            if new[-1] != token:
                break
        return new

    def run(self, steps: int = 10**9) -> list[int]:
        """Tokens drafted in each of so many steps, or until all have ended."""
        begin = len(self.drafted)
        while any(len(seq.tokens) < seq.max_len for seq in self.seqs) and len(self.drafted) < begin + steps:
            self.step()
        return self.drafted[begin:]


def seeing(right: Callable[[], float], rng: random.Random, most: int = 16) -> Callable[[Sequence], Drafter]:
    """A drafter each of whose tokens is right with the chance that holds at the moment."""

    def propose(seq: Sequence, room: int) -> Proposal:
        places = range(len(seq.tokens), len(seq.tokens) + min(most, room))
        tokens = [truth(seq, place) if rng.random() < right() else (truth(seq, place) + 1) % VOCAB for place in places]
        return Proposal(Source.LOOKUP, 6, 1.0, tokens)

    return lambda _: Says(propose)


def test_nothing_is_drafted_where_a_row_costs_a_step():
    world = World(LINEAR, seeing(lambda: 1.0, random.Random(1)))
    world.add(1, 100)
    assert sum(world.run()) == 0


def test_what_drafted_rows_cost_in_tokens():
    seconds = np.array([2.0, 2.0, 2.5, 4.0])
    lost = prices(seconds, decoding=4, extra=0.25)
    assert lost.tolist() == [0.0, 0.5, 2.0, 5.5]  # (0, 0.25, 1.0, 2.75) / 2.0 s of 4 tokens
    assert [affordable(a, lost) for a in (-3.0, 0.0, 0.4, 0.5, 1.9, 5.5, 9.0)] == [0, 0, 0, 1, 1, 3, 3]
    assert affordable(0.0, prices(np.ones(5), 1, 0.0)) == 4  # what is free is free


def test_everything_is_drafted_where_rows_are_free():
    world = World(FREE, seeing(lambda: 1.0, random.Random(1), most=LONGEST_DRAFT))
    world.add(1, 150)
    # as many rows as were measured, 64; 150 = 1 + 64 + 64 + 21, and the last token is never drafted
    assert world.run() == [63, 63, 20]


@pytest.mark.parametrize(("count", "most"), [(1, 15), (4, 12), (8, 8), (16, 0), (64, 0)])
def test_a_batch_that_fills_the_machine_drafts_nothing_and_a_small_one_does(count, most):
    world = World([1.0] * 5 + [2.0, 4.0], seeing(lambda: 0.6, random.Random(2)))  # the knee is at 16 rows
    world.add(count, 60)
    drafted = world.run(40 // max(1, most // 4))
    assert max(drafted) <= most + 1
    assert max(drafted[-5:]) >= most - 1


def test_drafts_go_where_they_promise_most():
    """One sequence whose drafts are right beside one whose drafts are not: the rows are the first one's."""
    rng = random.Random(3)
    good, bad = seeing(lambda: 0.95, rng), seeing(lambda: 0.0, rng)
    world = World(CPU, lambda seq: (good if seq.seed == 0 else bad)(seq))
    rows = []
    lengths = world.controller.lengths
    world.controller.lengths = lambda step: rows.append(lengths(step)) or rows[-1]
    world.add(2, 1000)
    world.run(70)
    assert sum(r[0] for r in rows[-20:]) > 150
    assert sum(r[1] for r in rows[-20:]) <= 20


def test_off_when_useless_and_on_again_when_right():
    """It is seen without drafting that proposals would have been right."""
    chance = [0.0]
    world = World(CPU, seeing(lambda: chance[0], random.Random(4)))
    world.add(1, 5000)
    useless = world.run(150)
    assert sum(useless[:20]) > 0  # it was tried
    assert sum(useless[40:]) == 0
    chance[0] = 1.0
    useful = world.run(60)
    first = next(i for i, drafted in enumerate(useful) if drafted)
    assert 0 < first < 40
    assert min(useful[-10:]) >= 8
    chance[0] = 0.0
    assert sum(world.run(300)[-50:]) <= 50  # at most one token, which costs three per cent of a step


def plain_seconds(count: int, tokens: int) -> float:
    world = World(CPU)
    world.add(count, tokens)
    assert sum(world.run()) == 0
    return world.clock.now


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("spoilt", [False, True])
def test_never_more_than_three_per_cent_slower(count, chance, spoilt):
    """Proposals that are hardly ever right, from the first token of a fresh engine on, or where they always were right."""
    now = [1.0]
    world = World(CPU, seeing(lambda: now[0], random.Random(5)))
    if spoilt:
        world.add(1, 2000)
        world.run()
    begin, now[0] = world.clock.now, chance
    world.add(count, 400)
    world.run()
    assert world.clock.now - begin < 1.03 * plain_seconds(count, 400)


@pytest.mark.parametrize("tokens", [4, 20, 60])
@pytest.mark.parametrize("spoilt", [False, True])
def test_a_short_answer_loses_half_a_token_and_two_per_cent_at_most(tokens, spoilt):
    """Whatever the estimates promise: after a turn from right to wrong they promise everything."""
    now = [1.0]
    world = World(CPU, seeing(lambda: now[0], random.Random(8)))
    if spoilt:
        world.add(1, 2000)
        world.run()
    begin, now[0] = world.clock.now, 0.0
    world.add(1, tokens)
    drafted = world.run()
    assert sum(drafted) > 0 or tokens == 4  # it was tried
    assert world.clock.now - begin <= (START + SHARE * tokens) * CPU[0] + plain_seconds(1, tokens) + 1e-4


def test_the_first_right_draft_takes_the_brake_off():
    world = World(CPU, seeing(lambda: 1.0, random.Random(9), most=LONGEST_DRAFT))
    world.add(1, 400)
    drafted = world.run()
    assert 0 < drafted[0] <= 12  # 0.5 of a step of 20 ms buys a step of 30 ms
    assert drafted[3] > 20


@pytest.mark.parametrize(("chance", "gain"), [(0.6, 1.5), (0.8, 2.2), (1.0, 5.0)])
def test_good_proposals_pay_and_the_receipt_says_how_much(chance, gain):
    world = World(CPU, seeing(lambda: chance, random.Random(6)))
    [seq] = world.add(1, 400)
    world.run()
    plain = plain_seconds(1, 400)
    assert plain / world.clock.now > gain
    assert seq.tally.saved_seconds == pytest.approx(plain - world.clock.now, rel=0.05)
    assert 0 < seq.tally.draft_seconds < 0.01


def test_prompts_of_the_same_step_count():
    """Rows are free up to the knee at 16, whoever takes them."""
    for other_rows, most in ((0, 15), (8, 7), (12, 3)):
        world = World([1.0] * 5 + [4.0, 8.0], seeing(lambda: 0.9, random.Random(7)))
        [seq] = world.add(1, 100)
        world.controller.draft([seq], other_rows)
        assert len(seq.draft.tokens) == most


def test_the_engines_drafters_by_mode():
    controller = World(FREE).controller
    controller = Controller("auto", controller.cost, VOCAB, controller.memory, controller.store, controller.clock)
    kinds = {"lookup": Lookup, "memory": Recollection}
    for mode in (None, "off", "auto", "lookup", "memory", "prediction", "forced", "draft"):
        [seq] = make_seqs("a", [1, 2, 3], speculate=mode)
        state = controller._state(seq)
        expected = {kind for name, kind in kinds.items() if mode in (None, "auto", name)}
        assert {type(d) for d in state.drafters} == expected
        assert not state.model_allowed  # there is no model
        assert controller._state(seq) is state
    request = make_seqs("a", [1, 2, 3])[0].request
    object.__setattr__(request, "prediction_ids", (1, 2))
    state = controller._state(Sequence(request, 0, 0, 10, constraint=Automaton({0: {}}, VOCAB)))
    assert [type(d).__name__ for d in state.drafters] == ["Forced", "Prediction", "Lookup", "Recollection"]
    assert isinstance(state.drafters[1], Prediction)


def test_lengths_are_for_the_sequences_that_can_draft():
    steps: list[Step] = []

    def lengths(step: Step) -> list[int]:
        steps.append(step)
        return [2] * len(step.seqs)

    world = World(FREE, seeing(lambda: 1.0, random.Random(8)))
    world.controller.lengths = lengths
    on, off = world.add(2, 10), world.add(3, 10, speculate="off")
    world.controller.draft(world.seqs, 4)
    [step] = steps
    assert step.seqs == on
    assert (step.decoding, step.rows) == (5, 9)
    assert [len(seq.draft.tokens) for seq in on] == [2, 2]
    assert [seq.draft for seq in off] == [None] * 3
    assert all(seq.tally.draft_seconds == 0.0 for seq in off)
    assert all(seq.tally.draft_seconds > 0.0 for seq in on)


def test_the_promising_proposal_is_kept_and_what_is_forced_comes_first():
    controller = World(FREE).controller
    [seq] = make_seqs("a", [1, 2, 3], limit=100)
    short = Says(lambda *_: Proposal(Source.LOOKUP, 1, 1.0, [4] * 8))
    long = Says(lambda *_: Proposal(Source.MEMORY, 20, 1.0, [5] * 8))
    stub = Says(lambda *_: Proposal(Source.PREDICTION, 20, 1.0, [6]))
    forced = Says(lambda *_: Proposal(Source.FORCED, LONGEST_DRAFT, 1.0, [7]))
    for drafters in itertools.permutations((short, long, stub)):
        state = Speculation(drafters, None)
        controller._propose(seq, state)
        assert state.proposal.source is Source.MEMORY
        controller._propose(seq, state := Speculation((drafters[0], forced, *drafters[1:]), None))
        assert state.proposal.source is Source.FORCED
    controller._propose(seq, state := Speculation((Says(lambda *_: None),), None))
    assert (state.proposal, state.kind) == (None, None)


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, VOCAB, 3], [1]),
        ([1, -1, 3], [1]),
        ([VOCAB - 1, 2**200], [VOCAB - 1]),
        ([-1], None),
        ([VOCAB], None),
        ([], None),
        ([0] * 100, [0] * 5),
        ([0, 0, 0, 0, 0, -1], [0] * 5),
        ([np.int32(3), np.int64(4)], [3, 4]),
    ],
)
def test_proposals_are_cut_to_what_may_be_drafted(tokens, kept):
    proposal = Proposal(Source.LOOKUP, 3, 1.0, list(tokens))
    assert World(FREE).controller.sane(proposal, 5) is (kept is not None)
    assert kept is None or proposal.tokens == kept


@pytest.mark.parametrize(("length", "trials"), [(0, 7), (1, 7), (4, 6)])
def test_a_proposal_is_judged_though_it_was_not_drafted_or_cut_short(length, trials):
    """As far as the model came in the same step: one token in each pass, and one for each that was drafted."""
    world = World(FREE, seeing(lambda: 1.0, random.Random(9), most=4))
    world.controller.lengths = always(length)
    [seq] = world.add(1, 9)
    world.run()
    [counts] = seq.speculation.own.values()
    assert (counts.right, counts.trials) == (trials, trials)


def test_what_was_proposed_and_wrong_is_judged_up_to_there():
    controller = World(FREE).controller
    [seq] = make_seqs("a", [1, 2, 3], limit=100)
    own: dict[Kind, Counts] = {}
    for chosen, expected in (([4, 5, 9], (2, 3)), ([4, 5, 6, 7, 8], (6, 7)), ([9], (6, 8)), ([4], (7, 9)), ([], (7, 9))):
        state = Speculation((), None, own)
        state.proposal = Proposal(Source.LOOKUP, 6, 1.0, [4, 5, 6, 7])
        state.kind = Kind(Source.LOOKUP, False, 3)
        seq.speculation = state
        controller.observe(StepPlan([seq], [2], [1], [True], [], 1), [chosen], 1.0)
        [counts] = own.values()
        assert (counts.right, counts.trials) == expected
        assert (state.proposal is None) is bool(chosen)


def test_a_constraint_drafts_what_is_forced():
    world = World(FREE)
    controller = Controller("forced", world.controller.cost, VOCAB, Memory(0, 0), IndexStore(0, 0), world.clock)
    [seq] = make_seqs("a", [1, 2, 3], limit=100)
    seq.constraint = Automaton({0: {5: 1}, 1: {6: 2}, 2: {7: 3, 8: 3}, 3: {}}, VOCAB)
    state = controller._state(seq)
    controller._propose(seq, state)
    assert (state.proposal.source, state.proposal.tokens) == (Source.FORCED, [5, 6])
    seq.constraint.accept(5)
    seq.tokens.append(5)
    controller._propose(seq, state)
    assert state.proposal.tokens == [6]


def test_a_drafter_that_failed_is_not_asked_again():
    def fail(*_: object) -> Proposal:
        raise KeyError("drafter")

    world = World(FREE, lambda seq: Says(fail) if seq.seed == 0 else seeing(lambda: 1.0, random.Random(1))(seq))
    world.add(2, 10)
    with pytest.raises(KeyError):
        world.controller.draft(world.seqs, 0)
    assert [seq.draft for seq in world.seqs] == [None, None]
    world.controller.draft(world.seqs, 0)
    assert world.seqs[0].draft is None
    assert len(world.seqs[1].draft.tokens) == 8
    world.controller.finish(world.seqs[0])
    assert world.controller.store.nbytes == world.controller.memory.nbytes == 0


def test_a_state_that_is_not_the_controllers_is_replaced():
    controller = World(FREE).controller
    [seq] = make_seqs("a", [1, 2, 3])
    seq.speculation = "something else"
    controller.finish(seq)
    assert seq.speculation is None
    assert isinstance(controller._state(seq), Speculation)
