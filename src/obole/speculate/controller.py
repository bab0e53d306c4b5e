"""Decides, for each sequence and step, which drafter to follow and for how many tokens.

Every drafter that a request allows is asked for a proposal, the one expected to yield most is kept, and the lengths are chosen
for the whole batch together (`lengths.py`) by what was observed of such proposals (`acceptance.py`) and what rows cost on this
machine (`costmodel.StepCost`). Each proposal is compared with what the model then chose, drafted or not: so it costs nothing to
learn that drafting would pay, or no longer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from obole.config import MultiToken
from obole.costmodel import StepCost
from obole.speculate import allowance
from obole.speculate.acceptance import Acceptance, Counts, Kind, kind_of
from obole.speculate.lengths import best_alone, best_lengths
from obole.speculate.lookup import IndexStore, Lookup
from obole.speculate.memory import Memory, Recollection, Tokens
from obole.speculate.multi_token import LEAST_CHANCE, MASKS, Calibration, Foresight, expected, foresight, unverified
from obole.speculate.prediction import Prediction
from obole.speculate.proposal import LONGEST_DRAFT, Proposal
from obole.types import Ahead, Sequence, Source, StepPlan

Clock = Callable[[], float]
Floats = np.ndarray[Any, np.dtype[np.float64]]
NOTHING: Mapping[int, list[Ahead]] = MappingProxyType({})

LONGEST_MODEL_DRAFT = 16
MODEL_DRAFT = Kind(Source.DRAFT, False, 3)  # a model's drafts have no match length


class Drafter(Protocol):
    """Proposes tokens for one sequence, which it follows from its first proposal to the end."""

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        """At most `most` tokens to follow the newest one; None if nothing comes to mind."""


class BatchDrafter(Protocol):
    """Proposes tokens for several sequences at once, at a price: a smaller model."""

    @property
    def seconds_per_token(self) -> float:
        """What one more token costs, for one sequence."""

    def propose(self, seqs: list[Sequence], lengths: list[int]) -> list[Proposal | None]:
        """At most `lengths[i]` tokens for each sequence; None for one that it cannot draft for."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""

    def forget_tenant(self, tenant: str) -> None:
        """Delete what is kept of a tenant's sequences."""

    def reset(self) -> None:
        """Forget all sequences: an exception may have cut anything short."""


class Forced:
    """What the grammar of the sequence leaves no choice about."""

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        tokens = seq.constraint.forced()[:most] if seq.constraint is not None else []
        return Proposal(Source.FORCED, LONGEST_DRAFT, 1.0, tokens) if tokens else None


@dataclass(slots=True)
class Speculation:
    """What the controller keeps of one sequence, as long as that lives."""

    drafters: tuple[Drafter, ...]
    lookup: Lookup | None
    own: dict[Kind, Counts] = field(default_factory=dict)
    proposal: Proposal | None = None  # for the place after the newest token
    kind: Kind | None = None
    remembered: bool = False  # when it has ended, as it draws on what is remembered of others
    model_allowed: bool = False
    allowance: float = allowance.START  # tokens that may be lost on drafts
    spent: float = 0.0  # seconds of the draft model for the step under way
    foresight: Foresight | None = None
    worths: list[float] | None = None  # of the rows of the proposal in tokens; None: by the kind of proposal


@dataclass(frozen=True, slots=True)
class Step:
    """What lengths are chosen by. `states[i]` is of `seqs[i]`; `decoding`: sequences that yield a token, these and those that
    want no drafts; `rows`: of the step without their drafts.
    """

    controller: Controller
    seqs: list[Sequence]
    states: list[Speculation]
    decoding: int
    rows: int

    def ask_model(self, which: list[int], lengths: list[int]) -> list[int]:
        """Put the draft model's proposals in the place of those of the sequences `which`; returns those that it had one for."""
        controller = self.controller
        model = controller.draft_model
        if model is None or not which:
            return []
        try:
            proposals = model.propose([self.seqs[i] for i in which], lengths)
        except BaseException:  # it is not asked again for these
            for i in which:
                self.states[i].model_allowed = False
            raise
        answered = []
        for i, proposal in zip(which, proposals, strict=True):
            if proposal is not None and controller.sane(proposal, LONGEST_MODEL_DRAFT):
                self.states[i].proposal, self.states[i].kind = proposal, MODEL_DRAFT
                answered.append(i)
        return answered


def leading(proposed: list[int], chosen: list[int]) -> tuple[int, int]:
    """How many proposed tokens were right, and how many were put to the test: those and the first wrong one."""
    right = 0
    for token, other in zip(proposed, chosen, strict=False):
        if token != other:
            return right, right + 1
        right += 1
    return right, right


def room_for(seq: Sequence, most: int) -> int:
    """Tokens that a draft of at most `most` may have for a sequence to be able to use them all."""
    return min(most, seq.max_len - 1 - len(seq.tokens))


Lengths = Callable[[Step], list[int]]


@dataclass(slots=True)
class Controller:
    """`mode`: the engine's setting, for requests without one. `vocab_size`: ids beyond are never drafted. `stretch`: times that
    drafts may lengthen a step for which several sequences wait. `least_chance`: of what is predicted ahead to be drafted.
    """

    mode: str
    cost: StepCost
    vocab_size: int
    memory: Memory
    store: IndexStore
    clock: Clock
    draft_model: BatchDrafter | None = None
    multi_token: MultiToken | None = None
    stretch: float = 3.0
    acceptance: Acceptance = field(default_factory=Acceptance)
    calibration: Calibration = field(default_factory=Calibration)
    least_chance: float = LEAST_CHANCE
    lengths: Lengths = field(default_factory=lambda: by_cost)
    saved: Callable[[Sequence, Tokens], None] | None = None  # told of texts that are remembered, to keep them for longer

    def draft(self, seqs: list[Sequence], other_rows: int) -> None:
        """Hang drafts on decoding sequences. `other_rows`: rows of the same step that are none of theirs (prompts).

        What a drafter raises is raised here. It is not asked again for its sequence, which can go on without drafts.
        """
        started = self.clock()
        able = []
        rows = other_rows
        for seq in seqs:
            rows += min(seq.pending, seq.stride)  # of one that loads, what it will lack
            try:
                state = self._state(seq)
                if state.foresight is not None and state.foresight.threshold is not None:
                    seq.draft = unverified(seq, state.foresight, room_for(seq, LONGEST_DRAFT))
                    rows += 0 if seq.draft is None else seq.draft.masks
                elif state.drafters or state.model_allowed or state.foresight is not None:
                    self._propose(seq, state)
                    able.append((seq, state))
            except BaseException:  # whoever failed is not asked again, so that the next step goes on without
                if not seq.request.params.lossy:  # masks cannot fail, and the text depends on them
                    seq.speculation = Speculation((), None)
                raise
        if not able:
            return
        members = [seq for seq, _ in able]
        step = Step(self, members, [state for _, state in able], len(seqs), rows)
        lengths = self.lengths(step)
        for (seq, state), length in zip(able, lengths, strict=True):
            if length and state.proposal is not None:
                seq.draft = state.proposal.draft(length)
            elif state.kind is MASKS:
                self.acceptance.fade(MASKS, state.own)
        share = (self.clock() - started) / len(able)
        for seq, state in able:
            state.spent = share if state.kind is MODEL_DRAFT else 0.0  # other drafters are asked whatever is drafted
            seq.tally.draft_seconds += share
            seq.tally.saved_seconds -= share

    def observe(
        self, plan: StepPlan, chosen: list[list[int]], seconds: float, ahead: Mapping[int, list[Ahead]] = NOTHING
    ) -> None:
        """Learn from a step before it is settled: what was chosen after each proposal, and how long the step took.

        `ahead`: what was predicted to come next, by index in the plan.
        """
        context = sum(plan.starts)
        context_rows = sum(start * rows for start, rows in zip(plan.starts, plan.rows, strict=True))
        drafted = [(start, len(s.draft.tokens)) for s, start in zip(plan.sequences, plan.starts, strict=True) if s.draft]
        plain = self.cost.of(  # the step without its drafts
            plan.total_rows - sum(n for _, n in drafted), context_rows - sum(start * n for start, n in drafted), context
        )
        if plan.total_rows <= self.cost.rows[-1]:
            self.cost.observe(plan.total_rows, context_rows, context, seconds)
        per_token = plain / max(1, sum(plan.samples))
        per_row = (seconds - plain) / max(1, sum(n for _, n in drafted))
        for i, (seq, tokens) in enumerate(zip(plan.sequences, chosen, strict=True)):
            state = seq.speculation
            if not tokens or not isinstance(state, Speculation):
                continue
            lost, state.spent = state.spent, 0.0
            if seq.draft is not None:
                seq.tally.saved_seconds += (len(tokens) - 1) * plain - max(0.0, seconds - plain)
                lost += per_row * len(seq.draft.tokens)
            state.allowance += allowance.SHARE + len(tokens) - 1 - lost / per_token
            proposal, kind = state.proposal, state.kind
            state.proposal = state.kind = None
            self._learn(seq, state, proposal, kind, tokens)
            if state.foresight is not None:
                state.foresight.ahead = ahead.get(i, [])
                if state.foresight.threshold is not None and seq.draft is not None:
                    state.foresight.took(len(tokens) - 1, seq.draft.masks)

    def _learn(
        self, seq: Sequence, state: Speculation, proposal: Proposal | None, kind: Kind | None, tokens: list[int]
    ) -> None:
        """From what was chosen in the place of a proposal."""
        if proposal is None or kind is None:
            return
        tried = proposal.tokens[: len(proposal.tokens) - proposal.masks]
        if proposal.distributions is not None:  # one drawn by noise of its own says nothing if it was not put to the test
            tried = [] if seq.draft is None else seq.draft.tokens
        right, tested = leading(tried, tokens)
        if state.foresight is not None and kind is MASKS:
            self.calibration.observe(state.foresight.ahead, right, tested)
        if tested:
            self.acceptance.observe(kind, state.own, right, tested)

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended: what it has read and written may draft for others of its tenant."""
        state, seq.speculation = seq.speculation, None
        if self.draft_model is not None:
            self.draft_model.forget(seq)
        if not isinstance(state, Speculation) or seq.private:
            return
        if state.lookup is not None and state.lookup.read:
            self.store.keep(seq, state.lookup, self.clock())
        if state.remembered and len(seq.tokens) > seq.prompt_len:
            tokens = self.memory.remember(seq, self.clock())
            if self.saved is not None and tokens is not None:
                self.saved(seq, tokens)

    def forget(self, tenant: str, request_id: str | None = None) -> None:
        """Delete the texts of a tenant, or of one of its requests: nothing is drafted from them any more."""
        if self.draft_model is not None and request_id is None:
            self.draft_model.forget_tenant(tenant)
        self.memory.forget(tenant, request_id)
        self.store.forget(tenant, request_id)

    def recover(self) -> None:
        """After an exception anywhere: nothing is held for sequences that nobody will hear of again."""
        if self.draft_model is not None:
            self.draft_model.reset()

    def _state(self, seq: Sequence) -> Speculation:
        state = seq.speculation
        if not isinstance(state, Speculation):
            state = seq.speculation = self._begin(seq)
        return state

    def _begin(self, seq: Sequence) -> Speculation:
        params = seq.request.params
        if params.lossy and self.multi_token is not None:
            return Speculation((), None, foresight=foresight(self.multi_token, params))
        mode = "mtp" if params.mtp == "verify" else params.speculate or self.mode

        def allows(source: Source) -> bool:
            return mode in ("auto", source.value)

        now = self.clock()
        self.memory.expire(now)
        self.store.expire(now)
        drafters: list[Drafter] = []
        lookup = self.store.start(seq) if allows(Source.LOOKUP) else None
        if seq.constraint is not None and allows(Source.FORCED):
            drafters.append(Forced())
        if seq.request.prediction_ids and allows(Source.PREDICTION):
            drafters.append(Prediction(seq.request.prediction_ids))
        if lookup is not None:
            drafters.append(lookup)
        remembered = allows(Source.MEMORY)
        if remembered:
            drafters.append(Recollection(self.memory))
        model_allowed = self.draft_model is not None and allows(Source.DRAFT)
        ahead = None
        if self.multi_token is not None and params.mtp != "off" and allows(Source.MTP):
            ahead = foresight(self.multi_token, params)
        return Speculation(tuple(drafters), lookup, remembered=remembered, model_allowed=model_allowed, foresight=ahead)

    def _propose(self, seq: Sequence, state: Speculation) -> None:
        """Ask every drafter and keep the proposal that promises most; what is certain needs no other."""
        most = room_for(seq, LONGEST_DRAFT)
        best, best_kind, promise = None, None, 0.0
        for drafter in state.drafters:
            proposal = drafter.propose(seq, most)
            if proposal is None or not self.sane(proposal, most):
                continue
            kind = kind_of(proposal)
            # a longer match says more, and much more where both are short; the chance of the first token stands for the rest
            worth = self.acceptance.first(kind, state.own) * min(len(proposal.tokens), 8)
            if kind.source is Source.FORCED:
                best, best_kind = proposal, kind
                break
            if worth > promise:
                best, best_kind, promise = proposal, kind, worth
        state.proposal, state.kind, state.worths = best, best_kind, None
        if state.foresight is not None and (best_kind is None or best_kind.source is not Source.FORCED):
            self._look_ahead(seq, state, state.foresight, promise)

    def _look_ahead(self, seq: Sequence, state: Speculation, ahead: Foresight, promise: float) -> None:
        """Put what the model has predicted, and masks, in the place of a proposal that promises less; drop it otherwise."""
        chances = self.calibration.survival(ahead.ahead, self.least_chance)
        del ahead.ahead[len(chances) :]
        proposal = ahead.proposal(room_for(seq, LONGEST_DRAFT)) if sum(chances) >= promise else None
        if proposal is not None:
            state.proposal, state.kind = proposal, MASKS
            state.worths = expected(proposal, chances, self.acceptance, state.own)

    def first_worth(self, state: Speculation, kind: Kind) -> float:
        """What the first row of the proposal promises in tokens."""
        return self.acceptance.first(kind, state.own) if state.worths is None else state.worths[0]

    def sane(self, proposal: Proposal, most: int) -> bool:
        """Cut a proposal to what may be drafted; False if nothing is left. Drafters are not trusted with memory accesses."""
        tokens = proposal.tokens[:most] if len(proposal.tokens) > most else proposal.tokens
        size = self.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < size:
            tokens = tokens[: next(i for i, token in enumerate(tokens) if not 0 <= token < size)]
        proposal.tokens = tokens
        return bool(proposal.tokens) and proposal.length > 0


def by_cost(step: Step) -> list[int]:
    """Lengths that promise the most tokens a second for the whole batch."""
    controller = step.controller
    cost, count, rows = controller.cost, len(step.seqs), step.rows
    contexts = sum(seq.num_computed for seq in step.seqs)
    per_row = cost.context_seconds * contexts / count
    context = cost.read_seconds * contexts + per_row * count
    curve = cost.curve(rows + 1)
    plain = float(curve[rows]) + context
    worth = step.decoding * (float(curve[rows + 1] - curve[rows]) + per_row) / plain  # tokens that a row costs
    may_pay = [_may_pay(controller, state, worth) for state in step.states]
    if controller.draft_model is None and not any(may_pay):
        return [0] * count  # as in most steps; the rest costs more
    most = _most_rows(step, cost.curve(step.decoding + LONGEST_DRAFT * count))
    if most == 0:
        return [0] * count
    seconds = cost.curve(rows + most)[rows:] + context
    lost = allowance.prices(seconds, step.decoding, per_row)
    survival = [_survival(controller, state, lost) if may else [] for state, may in zip(step.states, may_pay, strict=True)]
    _ask_where_it_pays(step, survival, seconds, per_row)
    return best_lengths(survival, step.decoding, seconds, per_row) if any(survival) else [0] * count


def _may_pay(controller: Controller, state: Speculation, worth: float) -> bool:
    """Whether the first row of a proposal promises more than it costs, and could be lost. `worth`: tokens that it costs."""
    kind = state.kind
    if kind is None:
        return False
    return kind.source is Source.FORCED or (state.allowance >= worth and controller.first_worth(state, kind) > worth)


def _survival(controller: Controller, state: Speculation, lost: Floats) -> list[float]:
    """What each row of a proposal promises, as far as it could be lost."""
    proposal, kind = state.proposal, state.kind
    if proposal is None or kind is None:
        return []
    length = len(proposal.tokens)
    if kind.source is not Source.FORCED:  # what is certain cannot be lost
        length = min(length, allowance.affordable(state.allowance, lost))
    if state.worths is not None:
        return state.worths[:length]
    return controller.acceptance.survival(kind, state.own, proposal.length, length)


def _most_rows(step: Step, curve: Floats) -> int:
    """Rows that may be drafted in all: where several wait for a token, as many as make the step `stretch` times longer."""
    rows = curve.size - 1 - step.decoding
    if step.decoding == 1:
        return rows
    longest = step.controller.stretch * curve[step.decoding]
    return min(rows, int(np.searchsorted(curve, longest, side="right")) - 1 - step.decoding)


def always(most: int) -> Lengths:
    """Whether it pays or not: up to `most` tokens of every proposal, the draft model's where there is no other."""

    def lengths(step: Step) -> list[int]:
        asked = [i for i, state in enumerate(step.states) if state.proposal is None and state.model_allowed]
        step.ask_model(asked, [room_for(step.seqs[i], min(most, LONGEST_MODEL_DRAFT)) for i in asked])
        return [0 if state.proposal is None else min(most, len(state.proposal.tokens)) for state in step.states]

    return lengths


def _ask_where_it_pays(step: Step, survival: list[list[float]], seconds: Floats, per_row: float) -> None:
    """Let the draft model write where it promises more than the proposal at hand, its own time counted."""
    controller = step.controller
    model = controller.draft_model
    if model is None:
        return
    lost = allowance.prices(seconds, step.decoding, per_row + model.seconds_per_token)
    asked: list[int] = []
    lengths: list[int] = []
    for i, state in enumerate(step.states):
        if not state.model_allowed:
            continue
        most = min(room_for(step.seqs[i], LONGEST_MODEL_DRAFT), allowance.affordable(state.allowance, lost))
        curve = controller.acceptance.survival(MODEL_DRAFT, state.own, 1, most)
        length, rate = best_alone(curve, step.decoding, seconds, per_row + model.seconds_per_token)
        if length and rate > best_alone(survival[i], step.decoding, seconds, per_row)[1]:
            asked.append(i)
            lengths.append(length)
        else:
            controller.acceptance.fade(MODEL_DRAFT, state.own)
    for i in step.ask_model(asked, lengths):
        proposal = step.states[i].proposal
        written = 0 if proposal is None else len(proposal.tokens)
        survival[i] = controller.acceptance.survival(MODEL_DRAFT, step.states[i].own, 1, written)
