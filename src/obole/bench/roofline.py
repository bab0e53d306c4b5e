"""How far each kind of step is from what the machine could do: its bytes at the read bandwidth, its products at their peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from obole.bench import inside
from obole.bench.drive import check_length, check_repeat, check_sequences, decode, read_prompt
from obole.bench.machine import Roofs, isa_of, roofs
from obole.bench.samples import Report, Samples, silent
from obole.config import ModelConfig
from obole.costmodel import visible_tokens
from obole.engine.engine import Engine
from obole.models.registry import Model

UNQUANTISED = 1.5  # bytes a weight from which products are made in fp32: bf16 has 2, the widest quantised kind 1.1


@dataclass(frozen=True, slots=True)
class Work:
    """Products (a multiplication and an addition) of a step, by the arithmetic that makes them."""

    int8: int
    fp32: int

    def seconds(self, roofs: Roofs) -> float:
        """The least that they take: both kinds use the same units, so their times add."""
        return self.int8 / roofs.int8_products_per_second + self.fp32 / roofs.fp32_products_per_second


@dataclass(frozen=True, slots=True)
class RooflineRow:
    """`bound_milliseconds`: the larger of both bounds; `distance`: the time as a multiple of it."""

    step: str
    rows: int
    context: int
    milliseconds: Samples
    bytes_read: float
    int8_products: int
    fp32_products: int
    bytes_milliseconds: float
    arithmetic_milliseconds: float
    bound_milliseconds: float
    distance: Samples


@dataclass(frozen=True, slots=True)
class Roofline:
    one_thread: Roofs
    all_threads: Roofs
    rows: list[RooflineRow]


def roofline(
    engine: Engine,
    sequences: Sequence[int] = (1, 16, 64),
    context: int = 64,
    steps: int = 32,
    prompt_tokens: int = 512,
    repeat: int = 3,
    report: Report = silent,
) -> Roofline:
    """The machine's roofs, and the steps of so many decoding sequences, and of a prompt, under them.

    A prompt longer than `max_batch_tokens` takes several steps; its time, bytes and products are those of all of them.
    Raises `InvalidRequest` for what does not fit into the engine.
    """
    check_repeat(repeat)
    check_length(engine, "prompt_tokens", prompt_tokens, 1)
    for count in sequences:
        check_sequences(engine, count, context, steps)
    stages = 2 + len(sequences) + 1
    isa = isa_of(engine.info.kernels)
    report("the machine, one thread", 0, stages)
    one = roofs(1, isa, repeat)
    report("the machine, all threads", 1, stages)
    machine = roofs(engine.info.threads, isa, repeat)
    rows = []
    for i, count in enumerate(sequences):
        report(f"{count} at once", 2 + i, stages)
        rows.append(_decoding(engine, machine, count, context, steps, repeat))
    report("reading a prompt", stages - 1, stages)
    rows.append(_prompt(engine, machine, prompt_tokens, repeat))
    return Roofline(one, machine, rows)


def linear_work(model: Model, rows: int, logit_rows: int) -> Work:
    """Products of a step's matrices with its rows."""
    c = model.config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    layers = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    head = model.head.in_features * model.head.out_features
    work = {False: 0, True: 0}
    work[model.layer_bytes < UNQUANTISED * layers] += rows * layers
    work[model.head.nbytes < UNQUANTISED * head] += logit_rows * head
    return Work(int8=work[True], fp32=work[False])


def attention_products(config: ModelConfig, start: int, rows: int) -> int:
    """Products of queries with keys and of weights with values, for the rows at positions [start, start + rows)."""
    layers = Counter(map(config.window_of, range(config.num_layers)))
    visible = sum(
        count * sum(visible_tokens(position, 1, window) for position in range(start, start + rows))
        for window, count in layers.items()
    )
    return 2 * config.num_heads * config.head_dim * visible


def _decoding(engine: Engine, machine: Roofs, count: int, context: int, steps: int, repeat: int) -> RooflineRow:
    rounds = [decode(engine, count, context, steps, seed=i) for i in range(repeat + 1)][1:]
    model = inside.model(engine)
    linear = linear_work(model, count, count)
    # on average over the steps: the middle one, as attention grows by the same with each
    attention = count * attention_products(model.config, context, steps) // steps
    milliseconds = Samples.of(r.seconds / steps * 1e3 for r in rounds)
    work = Work(linear.int8, linear.fp32 + attention)
    return _row(f"decode {count}", count, context, milliseconds, rounds[0].bytes_per_step, work, machine)


def _prompt(engine: Engine, machine: Roofs, tokens: int, repeat: int) -> RooflineRow:
    receipts = [read_prompt(engine, tokens, seed=i) for i in range(repeat + 1)][1:]
    model = inside.model(engine)
    linear = linear_work(model, tokens, 1)
    work = Work(linear.int8, linear.fp32 + attention_products(model.config, 0, tokens))
    milliseconds = Samples.of(r.prefill_seconds * 1e3 for r in receipts)
    read = receipts[0].weight_bytes + receipts[0].kv_bytes
    return _row(f"prompt of {tokens}", tokens, 0, milliseconds, read, work, machine)


def _row(step: str, rows: int, context: int, milliseconds: Samples, read: float, work: Work, machine: Roofs) -> RooflineRow:
    by_bytes = read / machine.read_bandwidth_bytes_per_second.median * 1e3
    by_arithmetic = work.seconds(machine) * 1e3
    bound = max(by_bytes, by_arithmetic)
    return RooflineRow(
        step=step,
        rows=rows,
        context=context,
        milliseconds=milliseconds,
        bytes_read=read,
        int8_products=work.int8,
        fp32_products=work.fp32,
        bytes_milliseconds=by_bytes,
        arithmetic_milliseconds=by_arithmetic,
        bound_milliseconds=bound,
        distance=Samples.of(ms / bound for ms in milliseconds.values),
    )
