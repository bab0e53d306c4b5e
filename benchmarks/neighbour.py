"""Decoding beside a busy process: what the thread pool loses when the machine is shared.

    python benchmarks/neighbour.py [MODEL] [--rounds 5]

Alternates decoding alone and beside one process that computes all the time. With c processors and one neighbour, a fair
share for c threads is c / (c + 1) of the speed alone; a pool that waits for its slowest thread at every loop gets far less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics

from obole import Engine, SamplingParams


def spin() -> None:
    while True:
        pass


def rate(engine: Engine) -> float:
    bill = engine.generate([5], SamplingParams(max_tokens=128, ignore_eos=True, speculate="off"))[0].receipt
    return (bill.output_tokens - 1) / bill.decode_seconds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", default="smollm2-135m")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    alone, beside = [], []
    with Engine(options.model, prefix_cache=False) as engine:
        rate(engine)
        for _ in range(options.rounds):
            alone.append(rate(engine))
            neighbour = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
            neighbour.start()
            beside.append(rate(engine))
            neighbour.kill()
            neighbour.join()
    processors = len(os.sched_getaffinity(0))
    share = statistics.median(beside) / statistics.median(alone)
    print(f"{options.model}: alone {statistics.median(alone):.0f} tokens/s ({min(alone):.0f}-{max(alone):.0f})")
    print(f"beside one busy process {statistics.median(beside):.0f} ({min(beside):.0f}-{max(beside):.0f}), {share:.0%} of it")
    print(f"a fair share of {processors} processors is {processors / (processors + 1):.0%}")


if __name__ == "__main__":
    main()
