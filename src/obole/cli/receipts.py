"""Receipts and engine facts as lines of text. Pure functions: GB and MB are powers of ten, times seconds."""

from __future__ import annotations

from obole.engine.results import Choice, EngineInfo
from obole.types import Receipt


def size(count: float) -> str:
    """Bytes with three significant digits: "98.4 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 999.5 else f"{count:,.0f} GB"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def decode_rate(receipt: Receipt) -> float | None:
    """Tokens per second while decoding: the first token belongs to the prefill. None where there is nothing to divide."""
    if receipt.output_tokens < 2 or receipt.decode_seconds <= 0:
        return None
    return (receipt.output_tokens - 1) / receipt.decode_seconds


def receipt_rows(choice: Choice) -> list[tuple[str, str]]:
    """(heading, text) for each line of the full receipt."""
    r = choice.receipt
    rate = decode_rate(r)
    per_token = max(r.output_tokens, 1)
    sources = " + ".join(f"{count:,} {name}" for name, count in r.sources.items()) or "none"
    work = [
        plural(r.forward_passes, "forward pass"),
        f"weights {size(r.weight_bytes)} ({size(r.weight_bytes / per_token)} a token)",
        f"KV {size(r.kv_bytes)} ({size(r.kv_bytes / per_token)} a token)",
    ]
    if r.preemptions:
        work.append(f"{plural(r.preemptions, 'preemption')}, {plural(r.recomputed_tokens, 'token')} recomputed")
    time = f"{r.queued_seconds:.2f} s queued + {r.prefill_seconds:.2f} s prefill + {r.decode_seconds:.2f} s decode"
    time += f" = {r.total_seconds:.2f} s"
    return [
        ("prompt", f"{plural(r.prompt_tokens, 'token')}: {r.cached_tokens:,} cached + {r.computed_tokens:,} computed"),
        ("output", f"{plural(r.output_tokens, 'token')}: {sources} · ended by {choice.finish_reason} · seed {r.seed}"),
        ("read", " · ".join(work)),
        ("time", time + (f" · {rate:.1f} tokens/s" if rate else "")),
    ]


def receipt_text(choice: Choice, heading: str = "receipt") -> str:
    rows = receipt_rows(choice)
    return "\n".join([f"── {heading} " + "─" * (58 - len(heading)), *(f"{name:<8}{text}" for name, text in rows)])


def chat_line(choice: Choice) -> str:
    """ "prompt 312 (296 cached) · 87 tokens · 41.2 tok/s · 0.08 s to first token"."""
    r = choice.receipt
    rate = decode_rate(r)
    parts = [f"prompt {r.prompt_tokens:,} ({r.cached_tokens:,} cached)", plural(r.output_tokens, "token")]
    parts += [f"{rate:.1f} tok/s"] if rate else []
    parts += [f"{r.queued_seconds + r.prefill_seconds:.2f} s to first token"]
    return " · ".join(parts)


def engine_line(info: EngineInfo) -> str:
    """What was loaded and what it took of the machine."""
    return " · ".join(
        [
            info.model,
            f"{info.architecture}, {info.parameters / 1e6:,.0f} M parameters, {size(info.weight_bytes)}",
            f"{info.kernels} kernels, {plural(info.threads, 'thread')}",
            f"KV pool {size(info.kv_bytes)} ({info.kv_tokens:,} tokens, {info.kv_dtype})",
            f"context {info.max_context:,}",
            f"loaded in {info.load_seconds:.2f} s",
        ]
    )
