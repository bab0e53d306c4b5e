"""What benchmarks have written: a real run of `obole bench serve` and variations of it."""

from __future__ import annotations

from typing import Any

STEP_COST = {
    "rows": [1, 2, 4, 8, 16, 32, 64],
    "seconds": [0.0173876419999, 0.0215386650633, 0.01974911892996, 0.036926785100328, 0.057973886246314, 0.10071017, 0.181],
    "context_seconds": 3.520414341500506e-06,
    "read_seconds": 1.8075221820243063e-06,
}  # fmt: skip
SECONDS = 8.119511583000076


def serve_document(**changes: Any) -> dict[str, Any]:
    """2026-12-01, ten requests, four at a time, SmolLM2 on two busy cores."""
    row = {
        "concurrency": 4, "requests": 10, "prompt_tokens": 121.5, "cached_tokens": 16.0, "output_tokens": 24.0, "errors": {},
        "seconds": SECONDS, "requests_per_second": 1.231601174255004, "output_tokens_per_second": 29.558428182120096,
        "first_token_p50_milliseconds": 1647.0236, "first_token_p90_milliseconds": 2204.49,
        "first_token_p99_milliseconds": 2612.081, "between_tokens_p50_milliseconds": 120.043,
        "between_tokens_p99_milliseconds": 225.56, "tokens_per_event": 2.129, "client_cores": 0.002,
        "totals": {
            "tokens": {"input": 1055, "cached_device": 160, "output": 133, "copied": 107},
            "passes": 123, "rejected": 120, "decode_seconds": 14.954030520000288,
        },
        "repetitions": {"seconds": [SECONDS], "requests_per_second": [1.231601174255004]},
    }  # fmt: skip
    whole = {"benchmark": "serve", "model": "smollm2-135m", "repeat": 1, "step_cost": STEP_COST}
    return {**whole, "weight_bytes": 96436224, "parameters": 134515008, "rows": [{**row, **changes}]}


def throughput_document() -> dict[str, Any]:
    rows = [
        {"sequences": n, "prompt_tokens": 32, "output_tokens": 12, "step_milliseconds": ms}
        for n, ms in ((1, 28.3), (4, 32.6), (16, 110.0))
    ]
    return {"benchmark": "throughput", "step_cost": STEP_COST, "weight_bytes": 96436224, "parameters": 134515008, "rows": rows}


def latency_document() -> dict[str, Any]:
    row = {
        "prompt_tokens": 512,
        "context": 0,
        "output_tokens": 128,
        "prefill_tokens_per_second": 640.0,
        "decode_tokens_per_second": 80.0,
    }
    return {"benchmark": "latency", "step_cost": STEP_COST, "rows": [row]}
