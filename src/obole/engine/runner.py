"""Runs one step plan on a model: copies, forward pass, choices, log-probabilities, and what was read for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from obole.costmodel import kv_bytes_read, weight_bytes_read
from obole.engine.batch import LogitRow, build_batch, logit_rows
from obole.engine.sampler import (
    Floats,
    Ints,
    choose,
    confidence,
    has_penalties,
    is_greedy,
    is_plain_greedy,
    masked,
    token_logprob,
)
from obole.engine.steps import Steps
from obole.errors import ModelError
from obole.types import Ahead, Distribution, Sequence, StepPlan, StepResult

LEAST_CONFIDENCE = 0.2  # of a predicted token for what follows it to be worth looking at
LOGIT_ROWS = 64  # rows of logits held at once: scoring a long prompt must not need rows x vocabulary of memory


@dataclass(frozen=True, slots=True)
class Runner:
    """`kv_layers`: (window, bytes per token) of each kind of layer, for the receipt. `vocab_size`: ids beyond are never chosen.

    `keeps_distributions`: the result says what each token was drawn from, where anything was left to chance.
    """

    steps: Steps
    num_groups: int
    kv_layers: tuple[tuple[int | None, int], ...]
    vocab_size: int | None = None
    keeps_distributions: bool = False

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows. Changes the pool and nothing else."""
        steps, model = self.steps, self.steps.model
        if plan.copies:
            steps.pool.copy(plan.copies)
        count = len(plan.sequences)
        result = StepResult(tokens=[[] for _ in range(count)], logprobs=[None] * count, prompt_logprobs=[None] * count)
        if self.keeps_distributions:
            result.distributions = [[] for _ in range(count)]
        wanted = logit_rows(plan)
        every_row = len(wanted) == plan.total_rows <= LOGIT_ROWS
        computed = steps.compute(build_batch(plan, self.num_groups), every_row)
        if computed.logits is not None and computed.best is not None:
            self._settle_rows(plan, result, wanted, computed.logits, computed.best)
        elif computed.hidden is not None:
            for i in range(0, len(wanted), LOGIT_ROWS):
                part = wanted[i : i + LOGIT_ROWS]
                logits = model.logits(computed.hidden[torch.tensor([w.row for w in part])])
                self._settle_rows(plan, result, part, logits, steps.ops.argmax(logits))
        result.weight_bytes = weight_bytes_read(
            plan.total_rows,
            -(-len(wanted) // LOGIT_ROWS),
            model.layer_bytes,
            model.head.nbytes,
            model.embedding.nbytes // model.embedding.out_features,
        )
        result.kv_bytes = [kv_bytes_read(s, n, self.kv_layers) for s, n in zip(plan.starts, plan.rows, strict=True)]
        return result

    def _settle_rows(
        self, plan: StepPlan, result: StepResult, part: list[LogitRow], logits: torch.Tensor, best: torch.Tensor
    ) -> None:
        values: Floats = logits.numpy()
        masks = any(s.draft is not None and s.draft.masks for s in plan.sequences)
        confidences = self.steps.ops.confidence(logits, best).tolist() if masks else [0.0] * len(part)
        for (i, _, position, offset), row, top, highest in zip(part, values, best.tolist(), confidences, strict=True):
            sequence = plan.sequences[i]
            params = sequence.request.params
            chosen = result.tokens[i]
            draft = sequence.draft
            at_mask = draft is not None and offset > draft.proposed
            follows = foresees(result, i, sequence, offset) if at_mask else may_follow(sequence, chosen, offset)
            if not follows:
                continue
            if not math.isfinite(row[top]):
                raise ModelError(f"The model computed {row[top]} as its largest logit: its weights are damaged.")
            if offset < 0:
                entries = result.prompt_logprobs[i]
                if entries is None:
                    entries = result.prompt_logprobs[i] = []
                entries.append(token_logprob(row, sequence.tokens[position + 1], params.prompt_logprobs or 0))
                continue
            known = row[: self.vocab_size]
            if at_mask and not params.lossy:
                likeliest = top if top < known.size else int(known.argmax())
                result.ahead.setdefault(i, []).append(Ahead(likeliest, confidence(row, top, highest, likeliest)))
                continue
            kept = result.distributions[i] if self.keeps_distributions and not is_greedy(params) else None
            token = self._choose(sequence, chosen, known, top, kept)
            if draft is not None and draft.threshold is not None:
                sure = confidence(row, top, highest, token)
                if at_mask and sure < draft.threshold:
                    continue
                result.confidences.setdefault(i, []).append(sure)
            chosen.append(token)
            if sequence.constraint is not None and not sequence.dead:
                sequence.constraint.accept(token)
            if params.logprobs is not None:
                reported = result.logprobs[i]
                if reported is None:
                    reported = result.logprobs[i] = []
                reported.append(token_logprob(row, token, params.logprobs))

    def _choose(self, sequence: Sequence, chosen: list[int], row: Floats, best: int, kept: list[Distribution] | None) -> int:
        """The token after those of the sequence and those `chosen` in this step; `kept` takes what it was drawn from."""
        params, constraint, draft = sequence.request.params, sequence.constraint, sequence.draft
        position = len(sequence.tokens) + len(chosen)
        # the token here is number position - prompt_len of the output: stop tokens are banned among the first min_tokens
        banned = sequence.stop_ids if position < sequence.min_len else frozenset()
        if not banned and constraint is None and is_plain_greedy(params) and best < row.size:
            return best
        drafted = None
        if draft is not None and draft.distributions is not None and len(chosen) < len(draft.tokens):
            drafted = draft.tokens[len(chosen)], draft.distributions[len(chosen)]
        return choose(
            row if constraint is None else masked(row, constraint.allowed()),
            params,
            sequence.seed,
            position,
            history=sequence.tokens + chosen if has_penalties(params) else sequence.tokens,
            prompt_len=sequence.prompt_len,
            banned=banned,
            noise=self._noise,
            drafted=drafted,
            kept=kept,
        )

    def _noise(self, seed: int, position: int, ids: Ints) -> Floats:
        noise: Floats = self.steps.ops.gumbel(seed, position, torch.from_numpy(np.ascontiguousarray(ids))).numpy()
        return noise


def foresees(result: StepResult, i: int, sequence: Sequence, offset: int) -> bool:
    """Whether the row of a mask counts: if all before it did. `offset`: drafted tokens and masks up to the row's own.

    Taken unverified are tokens of which the model is sure, from the first on (ConfAdapt, arXiv 2602.06019, section 3.3).
    """
    draft, chosen = sequence.draft, result.tokens[i]
    if draft is None or (sequence.constraint is not None and sequence.constraint.over):
        return False
    if draft.threshold is not None:
        return len(chosen) == offset and result.confidences[i][-1] >= draft.threshold
    ahead = result.ahead.get(i, [])
    sure = not ahead or ahead[-1].confidence >= LEAST_CONFIDENCE
    return sure and len(chosen) == draft.proposed + 1 and len(ahead) == offset - draft.proposed - 1


def may_follow(sequence: Sequence, chosen: list[int], offset: int) -> bool:
    """The one rule of verification: the row of a drafted token counts if that token is the one that was chosen there.

    `offset`: drafted tokens up to the row's own; none for a row that is no draft. Nothing follows the end of a constraint.
    """
    if offset < 1:
        return True
    draft = sequence.draft
    if draft is None or len(chosen) != offset or chosen[-1] != draft.tokens[offset - 1]:
        return False
    return sequence.constraint is None or not sequence.constraint.over
