"""One sequence by itself: how fast a prompt is read, and how fast tokens follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from obole.bench.drive import Decoding, check_length, check_repeat, check_sequences, decode, read_prompt
from obole.bench.machine import ReadBandwidth
from obole.bench.samples import Report, Samples, silent
from obole.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """`context`: tokens before the decoded ones, 0 standing for a prompt of a single token.

    `bytes_per_token`: weights and KV that the receipt charges to a decoded token, on average. `share_of_bandwidth`: those
    bytes times the rate, of the bandwidth measured right beside it.
    """

    prompt_tokens: int
    context: int
    output_tokens: int
    prefill_tokens_per_second: Samples
    decode_tokens_per_second: Samples
    bytes_per_token: float
    read_bandwidth_bytes_per_second: Samples
    share_of_bandwidth: Samples


def latency(
    engine: Engine,
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    contexts: Sequence[int] = (0, 2048),
    repeat: int = 3,
    report: Report = silent,
) -> list[LatencyRow]:
    """A row for each context. One round more than `repeat` is run and the first not counted: it records the steps.

    Raises `InvalidRequest` for what does not fit into the engine.
    """
    check_repeat(repeat)
    check_length(engine, "prompt_tokens", prompt_tokens, 1)
    for context in contexts:
        check_length(engine, "context", max(context, 1), output_tokens)
        check_sequences(engine, 1, max(context, 1), output_tokens)
    meter = ReadBandwidth(engine.info.threads)
    prefill: list[float] = []
    decoded: list[list[Decoding]] = [[] for _ in contexts]
    bandwidth: list[list[float]] = [[] for _ in contexts]
    stages = (repeat + 1) * (1 + len(contexts))
    for round_ in range(repeat + 1):
        report("reading a prompt", round_ * (1 + len(contexts)), stages)
        receipt = read_prompt(engine, prompt_tokens, seed=round_)
        if receipt.cached_tokens:
            raise RuntimeError(f"{receipt.cached_tokens} tokens of a new prompt were in the cache.")
        prefill.append(prompt_tokens / receipt.prefill_seconds)
        for i, context in enumerate(contexts):
            report(f"decoding after {context}", round_ * (1 + len(contexts)) + 1 + i, stages)
            decoded[i].append(decode(engine, 1, max(context, 1), output_tokens, seed=round_))
            bandwidth[i].append(meter.measure())
    return [
        _row(prompt_tokens, context, output_tokens, prefill[1:], steps[1:], reads[1:])
        for context, steps, reads in zip(contexts, decoded, bandwidth, strict=True)
    ]


def _row(
    prompt_tokens: int, context: int, output_tokens: int, prefill: list[float], decoded: list[Decoding], reads: list[float]
) -> LatencyRow:
    per_token = decoded[0].bytes_per_step  # the same in every round: it depends on numbers of tokens alone
    return LatencyRow(
        prompt_tokens=prompt_tokens,
        context=context,
        output_tokens=output_tokens,
        prefill_tokens_per_second=Samples.of(prefill),
        decode_tokens_per_second=Samples.of(d.tokens_per_second for d in decoded),
        bytes_per_token=per_token,
        read_bandwidth_bytes_per_second=Samples.of(reads),
        share_of_bandwidth=Samples.of(per_token * d.tokens_per_second / r for d, r in zip(decoded, reads, strict=True)),
    )
