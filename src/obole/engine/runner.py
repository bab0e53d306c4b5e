"""Runs one step plan on a model: copies, forward pass, choices, log-probabilities, and what was read for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from obole.costmodel import kv_bytes_read, weight_bytes_read
from obole.engine.batch import LogitRow, build_batch, logit_rows
from obole.engine.sampler import Floats, Ints, choose, is_plain_greedy, token_logprob
from obole.engine.steps import Steps
from obole.errors import ModelError
from obole.types import Sequence, StepPlan, StepResult

LOGIT_ROWS = 64  # rows of logits held at once: scoring a long prompt must not need rows x vocabulary of memory


@dataclass(frozen=True, slots=True)
class Runner:
    steps: Steps
    num_groups: int
    kv_layers: tuple[tuple[int | None, int], ...]  # (window, bytes per token) of each kind of layer, for the receipt

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows. Changes the pool and nothing else."""
        steps, model = self.steps, self.steps.model
        if plan.copies:
            steps.pool.copy(plan.copies)
        count = len(plan.sequences)
        result = StepResult(tokens=[[] for _ in range(count)], logprobs=[None] * count, prompt_logprobs=[None] * count)
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
        for (i, _, position), row, top in zip(part, values, best.tolist(), strict=True):
            if not math.isfinite(row[top]):
                raise ModelError(f"The model computed {row[top]} as its largest logit: its weights are damaged.")
            sequence = plan.sequences[i]
            params = sequence.request.params
            if position + 1 < sequence.prompt_len:
                entries = result.prompt_logprobs[i]
                if entries is None:
                    entries = result.prompt_logprobs[i] = []
                entries.append(token_logprob(row, sequence.tokens[position + 1], params.prompt_logprobs or 0))
            else:
                token = self._choose(sequence, row, top)
                result.tokens[i].append(token)
                if params.logprobs is not None:
                    result.logprobs[i] = [token_logprob(row, token, params.logprobs)]

    def _choose(self, sequence: Sequence, row: Floats, best: int) -> int:
        params = sequence.request.params
        position = len(sequence.tokens)
        # the token here is number position - prompt_len of the output: stop tokens are banned among the first min_tokens
        banned = sequence.stop_ids if position < sequence.min_len else frozenset()
        if not banned and is_plain_greedy(params):
            return best
        return choose(
            row,
            params,
            sequence.seed,
            position,
            history=sequence.tokens,
            prompt_len=sequence.prompt_len,
            banned=banned,
            noise=self._noise,
        )

    def _noise(self, seed: int, position: int, ids: Ints) -> Floats:
        noise: Floats = self.steps.ops.gumbel(seed, position, torch.from_numpy(np.ascontiguousarray(ids))).numpy()
        return noise
