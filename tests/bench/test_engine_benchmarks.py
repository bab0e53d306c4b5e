"""Benchmarks of whole steps: counts, sums and shares that hold whatever the speed."""

from __future__ import annotations

import math

import pytest

from obole import SamplingParams
from obole.bench import inside
from obole.bench.drive import decode, prompts, read_prompt
from obole.bench.latency import latency
from obole.bench.machine import Roofs
from obole.bench.overhead import CALLING, PARTS, WATCHED, Stopwatch, overhead
from obole.bench.roofline import Work, attention_products, linear_work, roofline
from obole.bench.samples import Samples
from obole.bench.throughput import throughput
from obole.engine.engine import Engine
from obole.errors import InvalidRequest
from obole.scheduler.scheduler import Scheduler


def test_decoding_reads_what_its_receipt_says(tiny_engine):
    engine = tiny_engine("llama")
    alone = decode(engine, 1, 20, 12, seed=3)
    [prompt] = prompts(engine, 1, 20, seed=3)
    whole, first = (
        engine.generate([prompt], SamplingParams(max_tokens=n, ignore_eos=True, speculate="off"), tenant=str(n))[0].receipt
        for n in (13, 1)
    )
    assert alone.weight_bytes == whole.weight_bytes - first.weight_bytes
    assert alone.kv_bytes == whole.kv_bytes - first.kv_bytes
    assert len(alone.step_seconds) == 12
    assert alone.tokens_per_second == pytest.approx(12 / alone.seconds)


def test_many_sequences_read_the_weights_once(tiny_engine):
    engine = tiny_engine("llama")
    one, five = decode(engine, 1, 20, 6, seed=0), decode(engine, 5, 20, 6, seed=0)
    embedding = inside.model(engine).embedding
    rows = 4 * 6 * embedding.nbytes // embedding.out_features
    assert five.weight_bytes == one.weight_bytes + rows
    assert five.kv_bytes == 5 * one.kv_bytes
    assert five.tokens_per_second == pytest.approx(30 / five.seconds)
    assert inside.running(engine) == 0


def test_prompts_that_take_several_steps_do_not_disturb_the_count(tiny_engine):
    engine = tiny_engine("llama", max_batch_tokens=16)
    assert decode(engine, 4, 30, 5, seed=0).kv_bytes > decode(engine, 4, 20, 5, seed=0).kv_bytes


def test_a_prompt_is_never_in_the_cache(tiny_engine):
    engine = tiny_engine("qwen2")
    for _ in range(3):
        receipt = read_prompt(engine, 40, seed=0)
        assert (receipt.cached_tokens, receipt.computed_tokens, receipt.output_tokens) == (0, 40, 1)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_latency(tiny_engine, arch):
    stages = []
    engine = tiny_engine(arch)
    rows = latency(engine, 40, 8, (0, 30), repeat=2, report=lambda *at: stages.append(at))
    assert [(r.context, r.prompt_tokens, r.output_tokens) for r in rows] == [(0, 40, 8), (30, 40, 8)]
    assert rows[0].prefill_tokens_per_second == rows[1].prefill_tokens_per_second
    assert rows[0].bytes_per_token < rows[1].bytes_per_token  # more context, more KV
    for row in rows:
        for rate, read, share in zip(
            row.decode_tokens_per_second.values,
            row.read_bandwidth_bytes_per_second.values,
            row.share_of_bandwidth.values,
            strict=True,
        ):
            assert rate > 0
            assert share == pytest.approx(rate * row.bytes_per_token / read)
        assert len(row.prefill_tokens_per_second.values) == 2
    assert [done for _, done, _ in stages] == list(range(9))
    assert {total for _, _, total in stages} == {9}


def test_throughput(tiny_engine):
    rows = throughput(tiny_engine("llama"), (4, 2), 12, 5, repeat=3)
    assert [r.sequences for r in rows] == [1, 2, 4]
    assert rows[0].ratio_to_one.values == (1.0, 1.0, 1.0)
    for row in rows:
        for i, ms in enumerate(row.step_milliseconds.values):
            assert row.decode_tokens_per_second.values[i] == pytest.approx(1e3 * row.sequences / ms)
            assert row.decode_tokens_per_second_each.values[i] == pytest.approx(1e3 / ms)
            assert row.ratio_to_one.values[i] == pytest.approx(ms / rows[0].step_milliseconds.values[i])


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_overhead_sums_to_the_step(tiny_engine, kernels):
    engine = tiny_engine("llama", kernels=kernels)
    before = [getattr(owner, name) for _, owner, name in WATCHED]
    rows = overhead(engine, (1, 3), context=10, steps=6, repeat=2)
    assert [getattr(owner, name) for _, owner, name in WATCHED] == before  # nothing of it stays
    for row, count in zip(rows, (1, 3), strict=True):
        assert row.sequences == count
        assert set(row.parts) == set(PARTS)
        assert all(us > 0 for us in row.parts.values())
        assert row.step_microseconds == pytest.approx(sum(row.parts.values()) + sum(row.kernels.values()))
        share = sum(row.parts.values()) / row.step_microseconds
        assert any(share == pytest.approx(value) for value in row.not_kernel_share.values)
        assert len(row.plain_step_microseconds.values) == 2
        if kernels == "native":
            assert {"linear", "attention", "norm", "rope", "kv_write", "activation", "argmax"} <= set(row.kernels)


def test_overhead_changes_no_answer(tiny_engine):
    engine = tiny_engine("llama")
    ids, params = [5, 9, 2, 7], SamplingParams(max_tokens=10, ignore_eos=True)
    expected = engine.generate([ids], params)[0].token_ids
    overhead(engine, (2,), context=5, steps=3, repeat=1)
    assert engine.generate([ids], params, tenant="cold")[0].token_ids == expected


def test_a_failing_step_leaves_the_engine_as_it_was(tiny_engine, monkeypatch):
    engine = tiny_engine("llama")
    settle = Scheduler.settle

    def fails(scheduler, plan, result, now):
        if plan.total_rows == len(plan.sequences):
            raise KeyboardInterrupt
        return settle(scheduler, plan, result, now)

    monkeypatch.setattr(Scheduler, "settle", fails)
    before = Engine._step, Scheduler.plan
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        overhead(engine, (2,), context=5, steps=3, repeat=1)
    assert (Engine._step, Scheduler.plan) == before


def test_stopwatch_counts_nested_parts_once():
    watch = Stopwatch()
    inner = watch.wrapped("inner", lambda: sum(range(1000)))
    outer = watch.wrapped("outer", lambda: [inner() for _ in range(3)])
    outer()
    assert set(watch.parts) == {"inner", "outer"}
    with watch.part(CALLING):
        sum(range(100_000))
        watch.book({"linear": 1000, "norm": 10})
    assert watch.kernels == {"linear": 1000, "norm": 10}
    assert watch.parts[CALLING] > -1010
    failing = watch.wrapped("failing", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing()
    outer()  # the stack is in order


def test_roofline(tiny_engine):
    engine = tiny_engine("llama")
    found = roofline(engine, (1, 3), context=9, steps=4, prompt_tokens=20, repeat=2)
    assert [r.step for r in found.rows] == ["decode 1", "decode 3", "prompt of 20"]
    assert (found.one_thread.threads, found.all_threads.threads) == (1, engine.info.threads)
    machine = found.all_threads
    for row in found.rows:
        assert row.bound_milliseconds == max(row.bytes_milliseconds, row.arithmetic_milliseconds)
        assert row.bytes_milliseconds == pytest.approx(1e3 * row.bytes_read / machine.read_bandwidth_bytes_per_second.median)
        assert row.distance.median == pytest.approx(row.milliseconds.median / row.bound_milliseconds)
        assert (row.int8_products, row.fp32_products > 0) == (0, True)  # a checkpoint in float32
    one, three, prompt = found.rows
    assert three.fp32_products == 3 * one.fp32_products
    assert prompt.fp32_products > one.fp32_products


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_products_are_those_of_the_model(tiny_engine, arch):
    model = inside.model(tiny_engine(arch))
    matrices = [m.weights for x in model.layers for m in (x.qkv, x.output, x.gate_up, x.down)]
    layers = sum(m.in_features * m.out_features for m in matrices)
    head = model.head.in_features * model.head.out_features
    assert linear_work(model, 5, 2) == Work(int8=0, fp32=5 * layers + 2 * head)
    config = model.config
    sliding = config.sliding_layers or (False,) * config.num_layers
    seen = sum(
        min(position + 1, config.sliding_window) if slides else position + 1 for slides in sliding for position in range(7, 60)
    )
    assert attention_products(config, 7, 53) == 2 * seen * config.num_heads * config.head_dim


def test_times_of_work_add():
    roofs = Roofs(
        1, Samples.of([1.0]), int8_products_per_second=4.0, fp32_products_per_second=2.0, bf16_products_per_second=None
    )
    assert Work(int8=8, fp32=6).seconds(roofs) == 5.0


@pytest.mark.parametrize(
    ("measure", "field"),
    [
        (lambda e: latency(e, 100_000, 8), "prompt_tokens"),
        (lambda e: latency(e, 8, 8, (100_000,)), "context"),
        (lambda e: latency(e, 8, 0, (0,)), "context"),
        (lambda e: latency(e, 8, 8, (0,), repeat=0), "repeat"),
        (lambda e: throughput(e, (0,)), "sequences"),
        (lambda e: throughput(e, (9,), 4, 4), "sequences"),  # more than run at once
        (lambda e: throughput(e, (8,), 60, 60), "sequences"),  # more than the pool holds
        (lambda e: overhead(e, (1,), context=100_000), "sequences"),
        (lambda e: roofline(e, (1,), context=8, steps=4, prompt_tokens=100_000), "prompt_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(tiny_engine, monkeypatch, measure, field):
    engine = tiny_engine("llama", max_sequences=8, blocks=40)
    monkeypatch.setattr(Engine, "_step", lambda _: pytest.fail("a step was computed"))
    with pytest.raises(InvalidRequest) as refusal:
        measure(engine)
    assert refusal.value.field == field


def test_steps_that_are_not_recorded_are_not_taken_apart(tiny_engine):
    with pytest.raises(InvalidRequest, match="recorded"):
        overhead(tiny_engine("llama"), (65,), context=2, steps=2)


def test_samples():
    samples = Samples.of([3.0, 1.0, 2.0])
    assert (samples.median, samples.lowest, samples.highest) == (2.0, 1.0, 3.0)
    assert math.isclose(Samples.of([1.0, 2.0]).median, 1.5)
