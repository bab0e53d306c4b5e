"""Receipts and engine facts as lines of text. Pure functions: GB and MB are powers of ten, times seconds."""

from __future__ import annotations

from collections.abc import Sequence

from obole.engine.results import Choice, EngineInfo
from obole.engine.sampler import is_greedy
from obole.prices import PriceList, plain, price
from obole.types import Receipt, SamplingParams, Tier

RULE = 62  # columns


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


def bytes_read(count: int, tokens: int) -> str:
    """ "482 MB (96.4 MB a token)"."""
    return f"{size(count)} ({size(count / tokens)} a token)" if tokens else size(count)


def shown_seed(choice: Choice, params: SamplingParams) -> str:
    """The seed that repeats an answer: as it was given, or as it was drawn. Nothing where no choice was left to chance."""
    if is_greedy(params):
        return ""
    return f" · seed {choice.receipt.seed if params.seed is None or choice.index else params.seed}"


def receipt_rows(choice: Choice, params: SamplingParams, prices: PriceList | None = None) -> list[tuple[str, str]]:
    """(heading, text) for each line of the full receipt of an answer to a request with `params`."""
    r = choice.receipt
    rate = decode_rate(r)
    prompt = f"{plural(r.prompt_tokens, 'token')}: {r.cached_tokens:,} cached{by_tier(r)} + {r.computed_tokens:,} computed"
    prompt += f" + {r.unread_tokens:,} unread" if r.unread_tokens else ""
    sources = ": " + " + ".join(f"{count:,} {name}" for name, count in r.sources.items()) if r.output_tokens else ""
    output = f"{plural(r.output_tokens, 'token')}{sources} · ended by {choice.finish_reason}{shown_seed(choice, params)}"
    work = [
        plural(r.forward_passes, "forward pass"),
        f"weights {bytes_read(r.weight_bytes, r.output_tokens)}",
        f"KV {bytes_read(r.kv_bytes, r.output_tokens)}",
    ]
    if r.preemptions:
        work.append(f"{plural(r.preemptions, 'preemption')}, {plural(r.recomputed_tokens, 'token')} recomputed")
    loaded = f", {r.load_seconds:.2f} s of it for cached blocks," if r.load_seconds >= 0.005 else ""
    time = f"{r.queued_seconds:.2f} s queued{loaded} + {r.prefill_seconds:.2f} s prefill + {r.decode_seconds:.2f} s decode"
    time += f" = {r.total_seconds:.2f} s"
    rows = [("prompt", prompt), ("output", output)]
    if r.drafted:
        rows.append(("drafts", drafts(r)))
    rows += [("read", " · ".join(work)), ("time", time + (f" · {rate:.1f} tokens/s" if rate else ""))]
    return rows if prices is None else [*rows, ("price", price_text(choice, prices))]


def price_text(choice: Choice, prices: PriceList) -> str:
    """ "0.000123 USD: input 0.0001 + output 0.000023". The prompt is charged with the first answer."""
    charge = price(choice.receipt, prices, prompt=choice.index == 0)
    parts = " + ".join(f"{kind} {plain(amount)}" for kind, _, amount in charge.lines)
    return f"{plain(charge.total)} {prices.currency}" + (f": {parts}" if parts else "")


def by_tier(r: Receipt) -> str:
    """ " (16 from device, 80 from ssd)" where anything came from a lower tier."""
    below = any(count for tier, count in r.cached_by_tier.items() if tier != Tier.DEVICE)
    parts = [f"{count:,} from {tier}" for tier, count in r.cached_by_tier.items() if count]
    return f" ({', '.join(parts)})" if below else ""


def drafts(r: Receipt) -> str:
    """ "312 tokens drafted, 14 of them in vain · 3 passes without · 0.01 s to find them · about 4.1 s saved"."""
    vain = sum(r.rejected.values())
    parts = [f"{plural(sum(r.drafted.values()), 'token')} drafted, {vain:,} of them in vain"]
    parts += [f"{plural(r.draftless_passes, 'pass')} without", f"{r.draft_seconds:.2f} s to find them"]
    parts += ["right in distribution only"] if r.acceptance == "distribution" else []
    parts += [unverified(r.confidences)] if r.confidences else []
    saved = r.saved_seconds
    parts += [f"about {abs(saved):.2f} s {'saved' if saved >= 0 else 'lost'}"]
    return " · ".join(parts)


def unverified(confidences: Sequence[float]) -> str:
    """ "lossy: 87 tokens unverified, confidence 0.98 on average, 0.91 at least"."""
    mean = sum(confidences) / len(confidences)
    count = plural(len(confidences), "token")
    return f"lossy: {count} unverified, confidence {mean:.2f} on average, {min(confidences):.2f} at least"


def receipt_text(
    choice: Choice, params: SamplingParams, heading: str = "receipt", width: int = RULE, prices: PriceList | None = None
) -> str:
    """The full receipt below a rule of `width` columns at most."""
    rows = receipt_rows(choice, params, prices)
    rule = f"── {heading} ".ljust(min(width, RULE), "─")
    return "\n".join([rule, *(f"{name:<8}{text}" for name, text in rows)])


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
