"""The synchronous engine: requests in, answers out. The one place where the parts are put together and run."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from obole.cache.tiers.reuse import Reuse, ReuseEstimator
from obole.cache.tiers.store import StoreStats
from obole.config import BLOCK_SIZE, engine_config
from obole.costmodel import StepCost
from obole.engine.assembly import assemble
from obole.engine.prompts import (
    Prompt,
    Tools,
    check_multi_token,
    check_params,
    held_tokens,
    prediction_ids,
    prompt_ids,
    split_prompts,
)
from obole.engine.results import Choice, Delta, Forgotten, Result, Score
from obole.engine.sampler import choice_seed
from obole.errors import InvalidRequest
from obole.models.loading import Progress
from obole.scheduler.receipt import receipt
from obole.text.detokenizer import Detokenizer
from obole.text.grammar import CompiledGrammar
from obole.text.tool_formats import ToolFormat, detect_format
from obole.types import Event, FinishReason, Grammar, Request, SamplingParams, Sequence, StepPlan, StepResult


@dataclass(slots=True)
class _Live:
    """A request on its way: the engine owns it from `submit` until its last delta is taken."""

    request: Request
    sequences: list[Sequence]
    texts: list[list[str]]
    deltas: deque[Delta] = field(default_factory=deque)
    unfinished: int = 0
    result: Result | None = None


class Engine:
    """Runs a model on this machine.

    `model`: a catalogue name, a folder with safetensors, a `.gguf` file or a Hugging Face repository id (with
    `revision`). Further keywords are the settings of `EngineConfig` and `SchedulerConfig`; an unknown one raises
    `ConfigError`. Raises `ModelError` when the model cannot be had or loaded. Not thread-safe: one thread at a time.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        *,
        revision: str | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        parts = assemble(str(model), revision, engine_config(settings), progress)
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        self._template = parts.template
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._controller = parts.controller
        self._tiering = parts.tiering
        self._reuse = ReuseEstimator()
        self.vocab_size = parts.vocab_size
        self._eos_ids = parts.eos_ids
        self._grammars = parts.grammars
        self._live: dict[str, _Live] = {}
        self._unwanted: deque[str] = deque()  # requests to cancel before the next step, from whatever thread or handler
        self._closed = False
        self._numbers = itertools.count(1)
        self._clock: Callable[[], float] = time.perf_counter

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output that one sequence can have, by the model's context and the size of the KV pool."""
        return self._scheduler.max_length

    @property
    def max_scored(self) -> int:
        """Tokens that `score` takes at once: all are computed, while the newest token of an answer is not."""
        return self._scheduler.max_prompt

    @property
    def step_cost(self) -> StepCost:
        """What steps cost here, as far as is known by now. The engine's own, which goes on learning."""
        return self._controller.cost

    @property
    def tier_stats(self) -> StoreStats | None:
        """What the tiers below the KV pool hold and have moved; None without any. From any thread."""
        return None if self._tiering is None else self._tiering.stats()

    @property
    def reuse(self) -> Reuse:
        """How often blocks of prompts come back, and what was found of them. From any thread."""
        return self._reuse.value()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes its tool calls; None where its chat template has none that is known."""
        return None if self._template is None else detect_format(self._template.source(with_tools=True))

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        tenant: str = "",
    ) -> list[Result]:
        """Answer one prompt or many, batched; results come in the order of the prompts.

        `params`: one for all, or one for each. Everything is checked before anything runs: an `InvalidRequest` for one
        prompt refuses the whole call.
        """
        split = split_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(split)
        elif isinstance(params, list | tuple):
            each = list(params)
        else:
            raise InvalidRequest("params", f"params must be SamplingParams or a list of them, not {type(params).__name__}.")
        if len(each) != len(split):
            raise InvalidRequest("params", f"There are {len(split)} prompts but {len(each)} params.")
        live: list[_Live] = []
        try:
            for prompt, ids, own in zip(split, [self._ids(prompt) for prompt in split], each, strict=True):
                live.append(self._submit(prompt, ids, own, tenant))
            while any(one.unfinished for one in live):
                self._step()
        finally:
            for one in live:
                self._drop(one)
        return [one.result for one in live if one.result is not None]  # all of them: each has ended

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, tenant: str = "") -> Stream:
        """Answer one prompt, a delta after each step that has news; the last delta carries the `Result`.

        The request is checked and queued at once. Closing the stream (or leaving its `with` block) cancels the request.
        """
        return Stream(self, self._submit(prompt, self._ids(prompt), params or SamplingParams(), tenant))

    def score(self, inputs: str | Seq[int] | Seq[str | Seq[int]], *, tenant: str = "") -> list[Score]:
        """Log-probability of each given token after those before it. Texts get the model's BOS as usual.

        Raises `InvalidRequest` for fewer than two tokens: the first one has nothing before it to be scored by.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        ids = [self._ids(text) for text in split_prompts(inputs)]
        for one in ids:
            if len(one) < 2:
                raise InvalidRequest("input", "Scoring needs at least two tokens.")
        results = self.generate(list(ids), params, tenant=tenant)
        return [
            Score(r.prompt_ids, tuple(None if p is None else p.logprob for p in r.prompt_logprobs or ()), r.receipt)
            for r in results
        ]

    def forget(self, tenant: str = "") -> Forgotten:
        """Delete what is kept of a tenant's requests, in every tier: blocks, and texts to draft from.

        Requests under way go on, and leave nothing behind. When this returns, files have been overwritten, unless the disk
        does not answer for a minute.
        """
        forgotten = self._forget(tenant)
        self._flush()
        return forgotten

    def _flush(self) -> None:
        """Wait for what was given to the disk. From any thread."""
        if self._tiering is not None:
            self._tiering.store.flush()

    def _forget(self, tenant: str) -> Forgotten:
        for live in self._live.values():
            for sequence in live.sequences if live.request.tenant == tenant else ():
                sequence.private = True
        self._controller.forget(tenant)
        device = self._scheduler.cache.forget(tenant)
        return Forgotten(device, 0 if self._tiering is None else self._tiering.forget(tenant))

    def close(self) -> None:
        """Cancel what is running and stop the helper processes. Requests are refused afterwards."""
        self._closed = True
        for live in list(self._live.values()):
            self._drop(live)
        if self._template is not None:
            self._template.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._tiering is not None:
            self._tiering.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        return prompt_ids(prompt, self.tokenizer, self._template, self.vocab_size)

    def _submit(self, prompt: Prompt, ids: tuple[int, ...], params: SamplingParams, tenant: str) -> _Live:
        live = self._prepare(prompt, ids, params, tenant)
        self._enter(live)
        return live

    def _prepare(
        self, prompt: Prompt, ids: tuple[int, ...], params: SamplingParams, tenant: str, tools: Tools | None = None
    ) -> _Live:
        """A request for an answer to `prompt`, whose tokens are `ids`, checked but not queued.

        The one half of submitting that is for any thread: it changes nothing.
        """
        if not isinstance(tenant, str):
            raise InvalidRequest("tenant", f"tenant must be text, not {type(tenant).__name__}.")
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("params", f"params must be SamplingParams, not {type(params).__name__}.")
        check_params(params, self.vocab_size, self.tokenizer is not None)
        check_multi_token(params, self._controller.multi_token)
        if params.speculate == "draft" and self._controller.draft_model is None:
            raise InvalidRequest("speculate", "speculate is draft, but this engine has no model that drafts: open it with one.")
        now = self._clock()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(
            id=f"request-{next(self._numbers)}",
            prompt_ids=ids,
            params=params,
            seed=choice_seed(seed, 0),
            eos_ids=self._eos_ids,
            tenant=tenant,
            hold_tokens=held_tokens(prompt, ids, params, self._template, tools),
            prediction_ids=prediction_ids(params, self.tokenizer, self.vocab_size),
            arrival=now,
        )
        limit = self._scheduler.max_length
        max_len = limit if params.max_tokens is None else len(ids) + params.max_tokens
        grammar = None if params.grammar is None else self._compiled(params.grammar)
        sequences = [self._sequence(request, i, max_len, grammar) for i in range(params.n)]
        return _Live(request, sequences, [[] for _ in sequences], unfinished=len(sequences))

    def _enter(self, live: _Live) -> None:
        """Queue a request, or raise `InvalidRequest` for one that can never be served."""
        if self._closed:
            raise InvalidRequest("engine", "This engine was closed: open another one.")
        self._scheduler.add(live.sequences)
        if self._tiering is not None and self._tiering.recall is not None:
            self._tiering.recall.meet(live.request.tenant)
        self._live[live.request.id] = live

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        if self._grammars is None:
            raise InvalidRequest("grammar", "This model has no tokenizer, so its answers cannot be held to a grammar.")
        return self._grammars.compile(grammar.kind, grammar.text)

    def _sequence(self, request: Request, index: int, max_len: int, grammar: CompiledGrammar | None) -> Sequence:
        text, params = None, request.params
        if self.tokenizer is not None:
            text = Detokenizer(self.tokenizer, params.stop, request.prompt_ids, params.shown_token_ids)
        constraint = None if grammar is None else grammar.start()
        sequence = Sequence(request, index, choice_seed(request.seed, index), max_len, text, constraint)
        if self._controller.multi_token is not None:
            sequence.stride = min(sequence.stride, self._controller.multi_token.most)
        return sequence

    def _step(self) -> None:
        try:
            while self._unwanted:
                if (live := self._live.get(self._unwanted.popleft())) is not None:
                    self._drop(live)
            scheduler = self._scheduler
            self._controller.draft(scheduler.decoding(), scheduler.other_rows())
            plan = scheduler.plan(self._clock())
            if plan is None:
                if self._tiering is not None and scheduler.is_loading:
                    self._tiering.wait()
                return
            try:
                result, seconds = self._run(plan)
            except BaseException:  # also Ctrl-C: the requests of this step are over, all others go on
                for event in self._scheduler.abandon(plan, self._clock()):
                    self._deliver(event)
                raise
            for event in scheduler.settle(plan, result, self._clock()):
                self._deliver(event)
            if self._tiering is not None:
                self._tiering.after_step(seconds)
        except BaseException:
            self._recover()
            raise

    def _run(self, plan: StepPlan) -> tuple[StepResult, float]:
        """What a step yields, and the seconds that its computing took."""
        if self._tiering is not None:
            self._tiering.carry(plan)
        if not plan.sequences:
            return StepResult([], [], []), 0.0
        started = self._clock()
        result = self._runner.run(plan)
        seconds = self._clock() - started
        self._controller.observe(plan, result.tokens, seconds, result.ahead)
        return result, seconds

    def _when_idle(self) -> bool:
        """Do some of what can wait until nothing is to be computed. False if there is nothing more of that now."""
        return self._tiering is not None and self._tiering.when_idle()

    def _recover(self) -> None:
        """After an exception: whatever the scheduler no longer knows must not be waited for."""
        self._controller.recover()
        repaired = self._scheduler.repair(self._clock())
        for live in self._live.values():
            # the news of a sequence may have been lost on its way here, and with it that the sequence has ended
            going_on = 0 if repaired else sum(s.finish_reason is None for s in live.sequences)
            if live.unfinished > going_on == 0:
                live.unfinished = 0
                live.result = self._result_of(live)
                live.deltas.append(Delta(0, "", (), live.result.finish_reason, live.result))
            live.unfinished = min(live.unfinished, going_on)

    def _deliver(self, event: Event) -> None:
        sequence = event.sequence
        live = self._live[sequence.request.id]
        text = ""
        if sequence.text is not None:
            if event.finish_reason is not None:
                sequence.text.flush()
            text = sequence.text.take()
            live.texts[sequence.index].append(text)
        if event.finish_reason is not None:
            self._hold(sequence)
            self._count_reuse(sequence)
            self._controller.finish(sequence)
            live.unfinished -= 1
            if not live.unfinished:
                live.result = self._result_of(live)
        logprobs = None
        if live.request.params.logprobs is not None and event.token_ids:
            logprobs = tuple(sequence.logprobs[-len(event.token_ids) :])
        live.deltas.append(
            Delta(sequence.index, text, event.token_ids, event.finish_reason, live.result, event.sources, logprobs)
        )

    def _count_reuse(self, sequence: Sequence) -> None:
        """Once for each prompt that was looked up in the cache."""
        cached, length = sequence.tally.cached, sequence.prompt_len
        if sequence.index == 0 and cached >= 0:
            cached += cached == length - 1  # the last token is never taken from the cache
            self._reuse.prompt(sequence.keys[: length // BLOCK_SIZE], self._clock(), cached // BLOCK_SIZE)

    def _hold(self, sequence: Sequence) -> None:
        """Keep the blocks of a prompt, where its request asks for it and it was answered."""
        request = sequence.request
        seconds = request.params.hold_seconds
        if seconds is None or sequence.private or sequence.finish_reason is FinishReason.CANCELLED:
            return
        until = self._clock() + seconds
        sequence.tally.held, keys = self._scheduler.cache.hold(sequence, request.hold_tokens, until)
        if self._tiering is not None:
            self._tiering.hold(keys, until)

    def _result_of(self, live: _Live) -> Result:
        params = live.request.params
        first = live.sequences[0]
        scored = None if params.prompt_logprobs is None else (None, *first.prompt_logprobs)
        choices = tuple(
            Choice(
                index=s.index,
                text="".join(text),
                token_ids=tuple(s.output_ids),
                finish_reason=s.finish_reason or FinishReason.CANCELLED,
                logprobs=None if params.logprobs is None else tuple(s.logprobs),
                receipt=receipt(s),
            )
            for s, text in zip(live.sequences, live.texts, strict=True)
        )
        return Result(live.request.id, live.request.prompt_ids, choices, scored)

    def _drop(self, live: _Live) -> None:
        """Forget a request; cancel it if it is not finished. Its last delta then says so."""
        if live.unfinished:
            for event in self._scheduler.cancel(live.request.id, self._clock()):
                self._deliver(event)
        self._live.pop(live.request.id, None)


class Stream(Iterator[Delta]):
    """The deltas of one request. `close()` or `cancel()` ends it; `result` is what there is, complete or cancelled."""

    def __init__(self, engine: Engine, live: _Live) -> None:
        self._engine = engine
        self._live = live

    def __next__(self) -> Delta:
        live = self._live
        while not live.deltas:
            if not live.unfinished:
                self.close()
                raise StopIteration
            self._engine._step()
        return live.deltas.popleft()

    @property
    def result(self) -> Result | None:
        """The whole result once the request has ended (also when it was cancelled), else None."""
        return self._live.result

    def close(self) -> None:
        """End the request now. Deltas that say so, and those not yet taken, can still be read."""
        self._engine._drop(self._live)

    def cancel(self) -> None:
        """End the request before the next step. Unlike `close`, for signal handlers and other threads."""
        self._engine._unwanted.append(self._live.request.id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:  # runs anywhere, even in the middle of a step
        if self._live.unfinished:
            self.cancel()
