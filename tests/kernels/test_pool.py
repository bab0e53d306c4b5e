"""The thread pool: callers that collide, workers that sleep, pools that end."""

from __future__ import annotations

import threading
import time

import torch

from tests.kernels.support import activations, native, same_bits, weights


def test_callers_at_the_same_time_get_their_own_results():
    ops = native(3)
    w = ops.pack_linear([weights("Q4_1", 512, 256)], [None])
    inputs = [activations(n, 256, seed=n) for n in (1, 5, 40)]
    expected = [native(1).linear(x, w) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(200):
            if not same_bits(ops.linear(inputs[i], w), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_workers_that_went_to_sleep_are_woken():
    ops = native(2)
    w = ops.pack_linear([weights("Q8_0", 1024, 256)], [None])
    x = activations(16, 256)
    expected = ops.linear(x, w)
    for pause in (0.0, 0.0001, 0.001, 0.01):
        for _ in range(10):
            time.sleep(pause)
            assert same_bits(ops.linear(x, w), expected)


def test_pools_come_and_go():
    before = threading.active_count()
    packed = None
    for threads in (1, 2, 4, 8) * 5:
        ops = native(threads)
        packed = ops.pack_linear([weights("F32", 64, 64)], [None])
        ops.linear(torch.ones(4, 64), packed)
    del ops
    assert threading.active_count() == before
    assert packed is not None
    assert native(1).linear(torch.ones(4, 64), packed).isfinite().all()  # weights outlive the pool that packed them
