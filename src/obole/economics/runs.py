"""What a benchmark or a server has measured, as one kind of record: tokens of each kind, and the time that they took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from obole.costmodel import StepCost
from obole.economics.reading import read_json
from obole.errors import InvalidRequest
from obole.prices import CACHED, COPIED, INPUT, OUTPUT
from obole.types import Tier

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]  # of a page of metrics: labels and values by name

HOW = "name what obole bench serve, throughput or latency wrote with --json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A stretch of time in which a machine made `tokens` (by kind of price). `seconds` is rented time, idle or not.

    `passes`: that decoded, counted once for each sequence; `rejected`: rows drafted in vain; `sequences`: that decoded at a
    time, the mean; `context`: tokens before a decoded one, and of these `prompt` ones, the means. `load_seconds`: that answers
    waited for cached blocks to come up. `milliseconds`: latencies by
    name ("ttft", "itl", "e2e" and their percentile, such as "ttft_p99"). `step`: what steps cost; None for other servers.
    `weight_bytes`, `parameters`: of the model, where they are known. `joules`: spent meanwhile, by where that was read.
    """

    name: str
    seconds: float
    tokens: Mapping[str, int]
    passes: float
    rejected: float = 0.0
    sequences: float = 1.0
    context: float = 0.0
    prompt: float = 0.0
    load_seconds: float = 0.0
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    step: StepCost | None = None
    weight_bytes: int | None = None
    parameters: int | None = None
    joules: Mapping[str, float] = field(default_factory=dict)


def read_runs(path: Path) -> list[Run]:
    """The runs of a document of `obole bench`. Raises `InvalidRequest`."""
    document = read_json(path, "from")
    if not isinstance(document, dict) or document.get("benchmark") not in READERS:
        raise InvalidRequest("from", f"{path} is no document that can be priced: {HOW}.")
    try:
        runs = READERS[document["benchmark"]](document)
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError):
        raise InvalidRequest(
            "from", f"{path} lacks what a price is made of, or is of another version: measure it anew."
        ) from None
    if not all(run.seconds > 0 and sum(run.tokens.values()) > 0 for run in runs):
        raise InvalidRequest("from", f"{path} has no tokens or no time in it: measure it anew.")
    return runs


def runs_of(document: Mapping[str, Any]) -> list[Run]:
    """The runs of a document that a benchmark of this version has just made."""
    return READERS[document["benchmark"]](document)


def step_of(document: Mapping[str, Any]) -> StepCost | None:
    found = document.get("step_cost")
    if not found:
        return None
    rows, seconds = [int(n) for n in found["rows"]], [float(s) for s in found["seconds"]]
    if not rows or rows[0] != 1 or rows != sorted(set(rows)) or len(rows) != len(seconds) or min(seconds) <= 0:
        raise ValueError("no cost of steps")
    return StepCost(rows, seconds, float(found["context_seconds"]), float(found["read_seconds"]))


def model_of(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": step_of(document), **{name: document.get(name) for name in ("weight_bytes", "parameters")}}


def _serve(document: Mapping[str, Any]) -> list[Run]:
    row = document["rows"][0]
    totals = row.get("totals") or {}
    seconds = float(sum(row["repetitions"]["seconds"]))
    rounds = zip(row["repetitions"]["requests_per_second"], row["repetitions"]["seconds"], strict=True)
    requests = round(sum(rate * length for rate, length in rounds))
    tokens = {kind: int(count) for kind, count in (totals.get("tokens") or {}).items()}
    if not tokens:  # another server: it says no more than OpenAI's usage does
        cached, prompt = row["cached_tokens"] * requests, row["prompt_tokens"] * requests
        answers = row["output_tokens"] * requests
        tokens = {INPUT: round(prompt - cached), CACHED[Tier.DEVICE]: round(cached), OUTPUT: round(answers)}
    outputs = tokens.get(OUTPUT, 0) + tokens.get(COPIED, 0)
    milliseconds = {
        f"{short}_{p}": float(row[f"{name}_{p}_milliseconds"])
        for short, name in (("ttft", "first_token"), ("itl", "between_tokens"), ("e2e", "whole_answer"))
        for p in ("p50", "p90", "p99")
        if f"{name}_{p}_milliseconds" in row
    }
    at_once = float(totals["decode_seconds"]) / seconds if totals.get("decode_seconds") else float(row["concurrency"])
    return [
        Run(
            name=f"{row['concurrency']} requests at a time",
            seconds=seconds,
            tokens=tokens,
            passes=float(totals.get("passes") or outputs - requests),
            rejected=float(totals.get("rejected") or 0.0),
            sequences=max(1.0, at_once),
            context=row["prompt_tokens"] + row["output_tokens"] / 2,
            prompt=row["prompt_tokens"],
            load_seconds=float(totals.get("load_seconds") or 0.0),
            milliseconds=milliseconds,
            joules=document.get("joules") or {},
            **model_of(document),
        )
    ]


def _throughput(document: Mapping[str, Any]) -> list[Run]:
    return [
        Run(
            name=f"{row['sequences']} sequences decoding",
            seconds=row["step_milliseconds"] / 1e3 * row["output_tokens"],
            tokens={OUTPUT: row["sequences"] * row["output_tokens"]},
            passes=row["sequences"] * row["output_tokens"],
            sequences=float(row["sequences"]),
            context=row["prompt_tokens"] + row["output_tokens"] / 2,
            prompt=float(row["prompt_tokens"]),
            milliseconds={name: float(row["step_milliseconds"]) for name in ("itl_p50", "itl_p99")},
            **model_of(document),
        )
        for row in document["rows"]
    ]


def _latency(document: Mapping[str, Any]) -> list[Run]:
    """A prompt and the tokens decoded after each context."""
    return [
        Run(
            name=f"one sequence after {row['context']} tokens",
            seconds=sum(
                row[f"{a}_tokens"] / row[f"{b}_tokens_per_second"] for a, b in (("prompt", "prefill"), ("output", "decode"))
            ),
            tokens={INPUT: row["prompt_tokens"], OUTPUT: row["output_tokens"]},
            passes=row["output_tokens"],
            context=float(row["context"]),
            prompt=float(row["prompt_tokens"]),
            milliseconds={
                "ttft_p50": 1e3 * row["prompt_tokens"] / row["prefill_tokens_per_second"],
                "itl_p50": 1e3 / row["decode_tokens_per_second"],
            },
            **model_of(document),
        )
        for row in document["rows"]
    ]


READERS: Mapping[str, Callable[[Mapping[str, Any]], list[Run]]] = {
    "serve": _serve,
    "throughput": _throughput,
    "latency": _latency,
}


def cost_facts(samples: Samples) -> dict[str, Any]:
    """What a server's metrics say of its model and its steps, as documents of benchmarks have it."""

    def one(name: str) -> float:
        return sum(value for _, value in samples.get(f"obole_{name}", ()))

    steps = sorted((int(labels["rows"]), value) for labels, value in samples.get("obole_step_seconds", ()))
    if not steps:
        return {}
    rows, seconds = [n for n, _ in steps], [s for _, s in steps]
    context = {f"{name}_seconds": one(f"step_{name}_seconds") for name in ("context", "read")}
    return {
        "step_cost": {"rows": rows, "seconds": seconds, **context},
        "weight_bytes": round(one("weight_bytes")),
        "parameters": round(one("parameters")),
    }


def run_of_server(before: Samples, after: Samples, seconds: float) -> Run:
    """What a server did between two looks at its metrics. Raises `InvalidRequest` where it did nothing."""

    def moved(name: str, *labels: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for sign, samples in ((-1, before), (1, after)):
            for own, value in samples.get(f"obole_{name}", ()):
                key = own[labels[0]] if labels else ""
                found[key] = found.get(key, 0.0) + sign * value
        return found

    tokens = {kind: round(count) for kind, count in moved("tenant_usage_tokens_total", "kind").items() if round(count) > 0}
    if not tokens:
        raise InvalidRequest("url", "No answer ended on the server meanwhile: measure for longer, by --seconds, or under load.")
    sources = moved("generation_tokens_total", "source")
    answers = moved("request_decode_time_seconds_count").get("", 0.0)
    outputs = tokens.get(OUTPUT, 0) + tokens.get(COPIED, 0)
    prompt = sum(count for kind, count in tokens.items() if kind in (INPUT, *CACHED.values())) / max(1.0, answers)
    drafted = sum(moved("spec_decode_num_draft_tokens_total", "source").values())
    accepted = sum(moved("spec_decode_num_accepted_tokens_total", "source").values())
    return Run(
        name="the server",
        seconds=seconds,
        tokens=tokens,
        passes=max(0.0, sources.get("model", outputs) - answers),
        rejected=max(0.0, drafted - accepted),
        sequences=max(1.0, moved("request_decode_time_seconds_sum").get("", 0.0) / seconds),
        context=prompt + outputs / max(1.0, answers) / 2,
        prompt=prompt,
        load_seconds=moved("kv_load_seconds_total").get("", 0.0),
        milliseconds=_latencies(before, after),
        **model_of(cost_facts(after)),
    )


def _latencies(before: Samples, after: Samples) -> dict[str, float]:
    """Percentiles of what was observed between, by the buckets of the histograms: their upper bounds."""
    found = {}
    for short, name in (("ttft", "time_to_first_token"), ("itl", "inter_token_latency"), ("e2e", "e2e_request_latency")):
        counts: dict[float, float] = {}
        for sign, samples in ((-1, before), (1, after)):
            for labels, value in samples.get(f"obole_{name}_seconds_bucket", ()):
                bound = float(labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sign * value
        total = counts.get(float("inf"), 0.0)
        for share in (50, 90, 99):
            bounds = [bound for bound, count in sorted(counts.items()) if count >= share / 100 * total]
            if total and bounds:
                found[f"{short}_p{share}"] = 1e3 * bounds[0]
    return found
