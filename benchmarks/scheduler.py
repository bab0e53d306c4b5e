"""What a step of 256 decoding sequences costs in the scheduler: `python benchmarks/scheduler.py`. The budget is 1 ms.

No model runs: the results of the steps are made up. Prints the median and the worst of `plan` + `settle` over steps of all
kinds, so the one step in sixteen that allocates for a sequence, registers its block and slides its window is in it.
"""

from __future__ import annotations

import statistics
import time

from obole.cache.managers import KVCacheManager
from obole.cache.spec import CacheGroup, StateKind
from obole.config import SchedulerConfig
from obole.scheduler.scheduler import Scheduler
from obole.types import Request, SamplingParams, Sequence, StepResult

SEQUENCES = 256
STEPS = 400
FULL = CacheGroup(StateKind.FULL, None, (0, 1))
SLIDING = CacheGroup(StateKind.SLIDING, 128, (2, 3))


def measure(groups: tuple[CacheGroup, ...]) -> tuple[float, float]:
    """Median and largest cost of a step, in milliseconds."""
    config = SchedulerConfig(max_batch_tokens=512, max_sequences=SEQUENCES)
    cache = KVCacheManager(groups, SEQUENCES * 64 * len(groups), {"weights": "none"}, chunk=512)
    scheduler = Scheduler(config, cache, 4096)
    for i in range(SEQUENCES):
        prompt = tuple(range(i, i + 20 + i % 16))  # lengths spread over a block, as in real traffic
        request = Request(id=str(i), prompt_ids=prompt, params=SamplingParams(max_tokens=600), seed=i)
        scheduler.add([Sequence(request, 0, i, len(prompt) + 600)])
    costs: list[float] = []
    while len(costs) < STEPS:
        before = time.perf_counter()
        plan = scheduler.plan(before)
        planned = time.perf_counter()
        assert plan is not None
        count = len(plan.sequences)
        decoding = plan.total_rows == count == SEQUENCES
        result = StepResult([[7] if s else [] for s in plan.samples], [None] * count, [None] * count, 10**8, [10**5] * count)
        made_up = time.perf_counter()
        scheduler.settle(plan, result, made_up)
        if decoding:
            costs.append((time.perf_counter() - made_up + planned - before) * 1e3)
    scheduler.check()
    return statistics.median(costs), max(costs)


if __name__ == "__main__":
    for name, groups in (("full attention", (FULL,)), ("one full, six sliding", (FULL, *[SLIDING] * 6))):
        median, worst = measure(groups)
        print(f"plan + settle, {SEQUENCES} decoding, {name}: median {median:.3f} ms, worst {worst:.3f} ms")
