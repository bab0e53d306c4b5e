"""Decides what each step computes. No torch, no clock of its own.

There are no phases: a sequence has tokens, and a count of those already computed; a step computes some of the rest, at most
`max_batch_tokens` rows over all sequences. Sequences that lack only what their last step has yielded, mostly a single token,
the decoding ones, are served first; what the budget (`budget.py`) leaves goes to the others, oldest first, and then to the
queue: a long prompt goes in pieces that make the decoding ones wait only `step_stretch` times longer. A draft is a few more
tokens that are not computed yet; it takes rows and blocks that nobody else wants, and is shortened or dropped without.
Sequences whose beginning is in a lower tier own blocks and wait, while others go on, until these are filled (`loading.py`).

Order of arrival is the one priority. Without room in the KV pool the youngest admitted sequence goes back to the queue, where
nobody overtakes it. So the oldest sequence is never interrupted, and since the pool could hold it alone (else it was
refused at the door), it ends; then another one is the oldest.
"""

from __future__ import annotations

from bisect import insort
from itertools import repeat

from obole.cache.ledger import LedgerError
from obole.cache.managers import KVCacheManager
from obole.config import BLOCK_SIZE, SchedulerConfig
from obole.costmodel import StepCost
from obole.errors import InvalidRequest
from obole.scheduler.admission import Stuck, longest_computable, refuse_impossible
from obole.scheduler.budget import StepBudget, step_budget
from obole.scheduler.loading import Loader
from obole.scheduler.rules import append, book_draft, check_places, due, end, lags, masks_due, most_rows, take
from obole.types import Draft, Event, FinishReason, Sequence, Source, Status, StepPlan, StepResult


class Scheduler:
    """`add` sequences, then `plan` a step, run it, and `settle` it, until nothing `has_work`.

    `max_context`: most tokens of prompt and output together. `cost`: what steps take; None: only rows are limited. `loader`
    brings blocks up from lower tiers; it may be set before anything is added. All times are seconds on the caller's clock.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, max_context: int, cost: StepCost | None = None) -> None:
        if cache.chunk < config.max_batch_tokens:
            raise ValueError(f"The cache reckons with {cache.chunk} tokens in a step, but max_batch_tokens is larger.")
        self.config = config
        self.cache = cache
        self.loader: Loader | None = None
        self.max_context = max_context
        self.cost = cost
        self.max_prompt = longest_computable(cache, max_context)
        """Most tokens of one sequence that an empty pool can compute, and so score."""
        self.max_length = min(max_context, self.max_prompt + 1)
        """Largest total length, prompt and output, that an empty pool can hold: the newest token is not computed."""
        self._order: dict[Sequence, int] = {}  # every live sequence: its number in order of arrival
        self._requests: dict[str, list[Sequence]] = {}  # live sequences by request id
        self._arrivals = 0
        self._waiting: list[Sequence] = []  # in order of arrival; they own no blocks
        self._running: list[Sequence] = []  # in order of arrival; they own blocks
        self._loading: list[Sequence] = []  # admitted, in order of arrival, and waiting for the loader; they own blocks
        self._dying: list[Sequence] = []  # cancelled during the step under way: they own blocks until it is settled
        self._lost: dict[Sequence, int] = {}  # preempted: how many tokens had been computed
        self._under_way: StepPlan | None = None
        self._stuck: Stuck | None = None

    # -- the door ---------------------------------------------------------------------------------------------------------

    def add(self, seqs: list[Sequence]) -> None:
        """Queue the n answers to one request, or none of them: raises `InvalidRequest` for what can never be served.

        All but the first wait until its prompt is computed and then share it.
        """
        for seq in seqs:
            if seq.request.id in self._requests:
                raise InvalidRequest("id", f"There already is a request {seq.request.id!r}; wait for it or use another id.")
            refuse_impossible(seq, self.cache, self.max_context, self.max_length, self.config.max_batch_tokens)
        for seq in seqs:
            seq.parent = seqs[0] if seq is not seqs[0] else None
            self._order[seq] = self._arrivals
            self._arrivals += 1
            self._requests.setdefault(seq.request.id, []).append(seq)
            self._waiting.append(seq)

    def cancel(self, request_id: str, now: float) -> list[Event]:
        """End all answers to a request, wherever they are. Unknown and finished requests are ignored.

        Blocks are free at once, except those of a step under way, which are free when it is settled.
        """
        events = []
        for seq in tuple(self._requests.get(request_id, ())):
            if seq.status is Status.WAITING:
                self._waiting.remove(seq)
            else:
                (self._loading if seq.status is Status.LOADING else self._running).remove(seq)
                if self._takes_part(seq):
                    seq.dead = True
                    self._dying.append(seq)
                elif self.loader is not None:
                    self.loader.drop(seq, None)
            self._finish(seq, FinishReason.CANCELLED, now)
            events.append(Event(seq, (), FinishReason.CANCELLED))
        return events

    def _takes_part(self, seq: Sequence) -> bool:
        """Whether the step under way reads or writes blocks of a sequence."""
        plan = self._under_way
        return plan is not None and (seq in plan.sequences or (self.loader is not None and self.loader.lays(seq)))

    @property
    def has_work(self) -> bool:
        return bool(self._order or self._dying)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def is_loading(self) -> bool:
        """Some sequence waits for blocks to come up."""
        return bool(self._loading)

    def decoding(self) -> list[Sequence]:
        """Sequences that a draft is of use for: those that run, do not lag and may have more than one token after the newest,
        and those that load and must not come to run without their masks."""
        running = [s for s in self._running if not lags(s) and len(s.tokens) < s.max_len - 1]
        return running + [s for s in self._loading if s.stride > 1 and s.prompt_len < len(s.tokens) < s.max_len - 1]

    def other_rows(self) -> int:
        """Rows that prompts will about take in the next step, beside the decoding sequences."""
        behind = [s for s in self._running if lags(s)]
        places = min(self.config.max_sequences, self.config.max_batch_tokens) - self._admitted
        entering = self._waiting[: min(places, 8)] if places > 0 and self._waiting and not self._still_stuck() else []
        if not behind and not entering:
            return 0
        budget = self._budget([s for s in self._running if not lags(s)])
        most = budget.room(behind[0].num_computed if behind else 0)
        rows = sum(s.pending for s in behind)
        return min(most, rows + sum(len(s.tokens) for s in entering) if rows < most else rows)

    def _budget(self, decoding: list[Sequence]) -> StepBudget:
        drafted = sum(len(s.draft.tokens) - masks_due(s) for s in decoding if s.draft is not None)
        rows = sum(s.pending + masks_due(s) for s in decoding)
        return step_budget(self.config, rows, sum(s.num_computed for s in decoding), self.cost, drafted)

    # -- plan -------------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now. `settle` it before planning the next one."""
        if self._under_way is not None:
            raise RuntimeError("The step under way must be settled before the next one is planned.")
        plan = self._under_way = StepPlan([], [], [], [], [])
        self.cache.ledger.expire(now)
        if self.loader is not None:
            self.loader.planned = now
        for seq in tuple(self._loading):
            self._advance(seq, plan, now)
        behind = self._plan_decoding(plan)
        if behind or self._waiting:
            budget = self._budget(plan.sequences)
            if self._plan_chunks(plan, behind, budget):
                self._admit(plan, now, budget)
        self._plan_drafts(plan)
        if not plan.sequences and not plan.promotions:
            if self._order and not self._loading and not self._running:
                raise RuntimeError(f"No step can be planned for {len(self._order)} sequences: the scheduler is stuck.")
            self._under_way = None
            return None
        plan.demotions = self.cache.ledger.take_given_up()
        return plan

    def _advance(self, seq: Sequence, plan: StepPlan, now: float) -> None:
        """Take a loading sequence further: what has come up is laid into its blocks, and when that was all, it runs."""
        loader = self.loader
        if loader is None or seq.status is not Status.LOADING:  # preempted by one before it
            return
        loader.lay(seq, plan)
        if loader.over(seq, now):
            self._loading.remove(seq)
            self._start(seq, loader.enter(seq, plan, now), now)
            if lags(seq):
                seq.draft = None
            self._make_room(seq, seq.num_computed + 1, plan)  # copies the last block at once if others hold it

    def _plan_decoding(self, plan: StepPlan) -> list[Sequence]:
        """Rows for each sequence that does not lag; returns the others. Runs 256 times a step: no calls off the boundary."""
        sequences, starts, rows, samples = plan.sequences, plan.starts, plan.rows, plan.samples
        behind = []
        for seq in self._running:  # loses its last elements when sequences are preempted, which Python allows
            start = seq.num_computed
            length = len(seq.tokens)
            count = length - start
            if count > seq.stride:
                behind.append(seq)
                continue
            count += masks_due(seq) if seq.stride > 1 else 0
            # Between steps no running sequence shares the block it writes next (see `_enter`), so only a new one is asked for.
            if (start % BLOCK_SIZE == 0 or count > 1) and not self._make_room(seq, start + count, plan):
                break
            sequences.append(seq)
            starts.append(start)
            rows.append(count)
            samples.append(length < seq.max_len)
        plan.total_rows = sum(rows)
        return behind

    def _plan_drafts(self, plan: StepPlan) -> None:
        """Last of all, when everybody has what a step without drafts would give."""
        for i, seq in enumerate(plan.sequences):
            if seq.draft is not None and seq.draft.threshold is None:
                self._plan_draft(plan, i, seq.draft)

    def _plan_draft(self, plan: StepPlan, i: int, draft: Draft) -> None:
        """Add rows for as much of a draft as the budget, the longest answer and the free blocks leave room for."""
        seq = plan.sequences[i]
        length = len(seq.tokens)
        most = min(len(draft.tokens), self.config.max_batch_tokens - plan.total_rows, seq.max_len - 1 - length)
        copies = self.cache.allocate(seq, length + most) if most > 0 else None
        if copies is None:
            seq.draft = None
            return
        if most < len(draft.tokens):
            seq.draft = draft.first(most)
        plan.copies += copies
        plan.rows[i] += most
        plan.total_rows += most

    def _plan_chunks(self, plan: StepPlan, behind: list[Sequence], budget: StepBudget) -> bool:
        """Parts of the prompts that are under way. False if there was no room for all of them, and so is none for others."""
        for seq in behind:
            start = seq.num_computed
            room = budget.room(start)
            if room <= 0:
                return False
            if seq.status is not Status.RUNNING:
                break
            rows = min(room, due(seq))
            if not self._make_room(seq, start + rows, plan):
                break
            append(plan, seq, rows)
            budget.take(rows, start)
        return True

    def _make_room(self, seq: Sequence, upto: int, plan: StepPlan) -> bool:
        """Blocks for the tokens before `upto`, at the cost of younger sequences. False if `seq` itself had to go."""
        while (copies := self.cache.allocate(seq, upto)) is None:
            youngest = max((queue[-1] for queue in (self._running, self._loading) if queue), key=self._order.__getitem__)
            self._preempt(youngest, plan)
            if youngest is seq:
                return False
        plan.copies += copies
        return True

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        if seq in plan.sequences:  # a decoding sequence makes way for an older prompt
            i = plan.sequences.index(seq)
            plan.total_rows -= plan.rows[i]
            for parallel in (plan.sequences, plan.starts, plan.rows, plan.samples):
                del parallel[i]
        seq.draft = None
        (self._loading if seq.status is Status.LOADING else self._running).remove(seq)
        if seq.status is Status.RUNNING:
            self._lost[seq] = seq.num_computed
            seq.tally.preemptions += 1
        if self.loader is not None:
            self.loader.drop(seq, plan)
        self.cache.release(seq)
        seq.status = Status.WAITING
        insort(self._waiting, seq, key=self._order.__getitem__)

    # -- admission --------------------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, now: float, budget: StepBudget) -> None:
        if not self._waiting or self._still_stuck():
            return
        waiting = self._waiting
        reserve = sum(self._wants_soon(seq) for seq in (*self._running, *self._loading))
        i = 0
        rows = self.config.max_batch_tokens - sum(most_rows(seq) for seq in (*self._running, *self._loading))
        while i < len(waiting) and budget.room(0) > 0 and self._admitted < self.config.max_sequences:
            seq = waiting[i]
            if most_rows(seq) > rows:
                break
            parent = seq.parent
            at_work = parent is not None and parent.status in (Status.RUNNING, Status.LOADING)
            if parent is not None and at_work and parent.num_computed < parent.prompt_len:
                i += 1  # waits for a prompt that is being computed, which is no reason for others to wait
            elif self._enter(seq, plan, now, reserve, budget):
                del waiting[i]
                rows -= most_rows(seq)
                reserve += self._wants_soon(seq)
            else:
                self._stuck = Stuck(seq, self.cache.available, self._admitted)
                break

    @property
    def _admitted(self) -> int:
        return len(self._running) + len(self._loading)

    def _still_stuck(self) -> bool:
        stuck = self._stuck
        return stuck is not None and stuck.lasts(self._waiting[0], self.cache.available, self._admitted)

    def _enter(self, seq: Sequence, plan: StepPlan, now: float, reserve: int, budget: StepBudget) -> bool:
        """Give a waiting sequence a place if all of its tokens fit beside the `reserve` that the running ones want soon."""
        cache = self.cache
        parent = seq.parent
        forked = parent is not None and parent.status is Status.RUNNING and cache.fork(parent, seq)
        if not forked:
            hit = cache.match(seq)
            if self.loader is not None and (tokens := self.loader.worth(seq, hit, now, bool(plan.sequences))):
                return self._load(seq, tokens, hit, plan, now, reserve, budget)
            cache.attach(seq, hit)
        hit = seq.num_computed
        upto = hit + min(due(seq), max(1, budget.room(hit)))
        fits = not self._admitted or cache.missing(seq, len(seq.tokens)) + reserve <= cache.available
        # Copies the last block at once if others hold it, so that the sequence owns what it will write.
        copies = cache.allocate(seq, upto) if fits else None
        if copies is None:
            cache.release(seq)
            return False
        plan.copies += copies
        if forked and parent is not None:
            seq.prompt_logprobs = list(parent.prompt_logprobs)
        self._start(seq, hit, now)
        if upto > hit:
            append(plan, seq, upto - hit)
            budget.take(upto - hit, hit)
        return True

    def _load(self, seq: Sequence, tokens: int, hit: int, plan: StepPlan, now: float, reserve: int, budget: StepBudget) -> bool:
        """Give a waiting sequence blocks for `tokens` cached tokens; those beyond `hit` come up from a lower tier."""
        cache, loader = self.cache, self.loader
        places = cache.reserve(seq, tokens)
        # as in `_enter`, and one more block in each group to copy the last one to
        needed = cache.missing(seq, len(seq.tokens)) + len(cache.groups) + reserve
        if loader is None or places is None or (self._admitted and needed > cache.available):
            cache.release(seq)
            return False
        loader.begin(seq, places, tokens, hit, now)
        seq.parent = None
        seq.status = Status.LOADING
        insort(self._loading, seq, key=self._order.__getitem__)
        self._advance(seq, plan, now)
        if seq.status is Status.RUNNING:
            start = seq.num_computed
            rows = min(due(seq), max(1, budget.room(start)))
            if rows and self._make_room(seq, start + rows, plan):
                append(plan, seq, rows)
                budget.take(rows, start)
        return True

    def _start(self, seq: Sequence, hit: int, now: float) -> None:
        """It runs from now on, with `hit` tokens that were cached."""
        seq.parent = None
        seq.status = Status.RUNNING
        insort(self._running, seq, key=self._order.__getitem__)
        tally = seq.tally
        if tally.first_scheduled is None:
            tally.first_scheduled = now
            tally.cached = hit
        tally.recomputed += max(0, self._lost.pop(seq, 0) - hit)

    def _wants_soon(self, seq: Sequence) -> int:
        """Blocks that a running sequence wants soon: for the rest of its prompt, and one more in each group.

        Without this reserve, a sequence let in today would be thrown out tomorrow, and computed twice.
        """
        length = len(seq.tokens)
        prompt = self.cache.missing(seq, length) if length - seq.num_computed > 1 else 0
        return prompt + len(self.cache.groups)

    # -- settle -----------------------------------------------------------------------------------------------------------

    def settle(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Book what a step has yielded. Returns the news of every sequence that has any, in the order of the plan."""
        self._check_under_way(plan)
        events: list[Event] = []
        rows_before = 0
        weight_bytes, total_rows = result.weight_bytes, plan.total_rows
        charged = 0
        for i, (seq, start, rows, tokens, kv_bytes) in enumerate(
            zip(plan.sequences, plan.starts, plan.rows, result.tokens, result.kv_bytes or repeat(0), strict=False)
        ):
            tally = seq.tally
            tally.passes += 1
            tally.kv_bytes += kv_bytes
            rows_before += rows
            share = weight_bytes * rows_before // total_rows - charged  # by rows; the shares sum to the whole
            tally.weight_bytes += share
            charged += share
            if seq.dead:
                continue
            seq.prompt_logprobs += result.prompt_logprobs[i] or ()
            computed = start + rows - (0 if seq.draft is None else seq.draft.masks)
            reason = None
            sources: tuple[Source, ...] = ()
            if tokens:
                if tally.first_token is None:
                    tally.first_token = now
                taken, reason = take(seq, tokens)
                if taken < len(tokens):
                    tokens = tokens[:taken]
                sources = book_draft(seq, tokens)
                seq.logprobs += (result.logprobs[i] or ())[:taken]
                if i in result.confidences:
                    tally.confidences += result.confidences[i][1:taken]
                computed = min(computed, len(seq.tokens) - 1)  # drafts that were turned down are not part of it
            elif computed >= seq.max_len:
                reason = FinishReason.LENGTH  # only the prompt was wanted
            seq.num_computed = computed
            if computed // BLOCK_SIZE > seq.num_registered:
                self.cache.commit(seq)
            if computed < start + rows:
                self.cache.trim(seq)
            if reason is not None:
                self._finish(seq, reason, now)
            if tokens or reason is not None:
                events.append(Event(seq, tuple(tokens), reason, sources))
        if self.loader is not None:
            self.loader.settled(now)
        self._sweep()
        self._under_way = None
        return events

    def abandon(self, plan: StepPlan, now: float) -> list[Event]:
        """Give up the step under way, because it failed: cancels all requests that were part of it."""
        self._check_under_way(plan)
        self._sweep()
        self._under_way = None
        ids = dict.fromkeys(seq.request.id for seq in plan.sequences if seq.status is Status.RUNNING)
        events = [event for request_id in ids for event in self.cancel(request_id, now)]
        for seq in [] if self.loader is None else self.loader.abandoned():
            if seq.status in (Status.RUNNING, Status.LOADING):
                self._preempt(seq, plan)
        return events

    def repair(self, now: float) -> bool:
        """After an exception anywhere: True if planning or settling was cut short, or the books do not balance.

        Then nothing can be relied on, neither which blocks were to be copied nor who holds them: all requests are
        cancelled, without events, and the cache starts empty.
        """
        if self._under_way is None:
            try:
                self.check()
                return False
            except LedgerError:
                pass
        for seq in self._order:
            end(seq, FinishReason.CANCELLED, self._lost.get(seq, 0), now)
            seq.tables = []
            seq.num_computed = seq.num_registered = 0
        self._order.clear()
        self._requests.clear()
        self._lost.clear()
        self._waiting, self._running, self._loading, self._dying = [], [], [], []
        if self.loader is not None:
            self.loader.reset()
        self._under_way = self._stuck = None
        self.cache.reset()
        return True

    def _check_under_way(self, plan: StepPlan) -> None:
        if plan is not self._under_way:
            raise RuntimeError("Only the step under way can be settled or abandoned, and only once.")

    def _sweep(self) -> None:
        """Take finished sequences off the running ones; those cancelled during the step give back their blocks."""
        self._running = [seq for seq in self._running if seq.status is Status.RUNNING]
        for seq in self._dying:
            self.cache.release(seq)
        self._dying.clear()

    def _finish(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence. The caller takes it off its list; blocks of a step under way are left to `_sweep`."""
        end(seq, reason, self._lost.get(seq, 0), now)
        if not seq.dead:
            self.cache.release(seq)
        self._lost.pop(seq, None)
        del self._order[seq]
        siblings = self._requests[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.id]

    # -- books ------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `LedgerError` unless every live sequence is in one place and every block has its rightful holders."""
        live = {seq for seqs in self._requests.values() for seq in seqs}
        loads = set() if self.loader is None else set(self.loader.loading)
        check_places(live, self._waiting, self._running, self._loading, loads)
        if live != set(self._order) or not set(self._lost) <= {*self._waiting, *self._loading}:
            raise LedgerError("A sequence is on some list that it should not be on.")
        self.cache.check([*self._running, *self._loading, *self._dying])
        if not self.has_work and self.cache.usage().in_use:
            raise LedgerError("The engine is idle, but blocks are in use.")
