"""Raw logits of every position, through the same plan, batch and kernels that serve requests."""

from __future__ import annotations

import torch

from obole import Engine, SamplingParams
from obole.engine.batch import build_batch


def all_logits(engine: Engine, ids: list[int]) -> torch.Tensor:
    """float32 (len(ids), vocabulary)."""
    live = engine._submit(list(ids), tuple(ids), SamplingParams(max_tokens=0, prompt_logprobs=0), "")
    runner, parts = engine._runner, []
    while live.unfinished:
        plan = engine._scheduler.plan(engine._clock())
        model = runner.steps.model
        parts.append(model.logits(model.forward(build_batch(plan, runner.num_groups).as_batch(), runner.steps.pool)))
        result = runner.run(plan)
        for event in engine._scheduler.settle(plan, result, engine._clock()):
            engine._deliver(event)
    engine._drop(live)
    return torch.cat(parts)
