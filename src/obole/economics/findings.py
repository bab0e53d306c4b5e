"""The findings of an audit as one JSON document, from which tables and the report are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from obole.config import BLOCK_SIZE
from obole.economics.audit import MODES, Audit, mean
from obole.economics.passages import passages
from obole.economics.replay import BUCKETS

CURVE_POINTS = 160
SIZES = tuple(1 << n for n in range(12, 34, 2))  # tokens, where nothing says what a token takes
PERCENTILES = (50, 90, 99)
SHOWN = 160  # characters of a passage

Tiers = Mapping[str, int]  # name -> bytes, fastest first
Decode = Callable[[Sequence[int]], str]


def findings(audit: Audit, kv_bytes: int | None, tiers: Tiers, decode: Decode | None, skipped: Sequence[str]) -> dict[str, Any]:
    """`kv_bytes`: of a token's keys and values; None: caches are measured in tokens only."""
    machine = audit.machine
    document: dict[str, Any] = {
        "kinds": dict(audit.kinds),
        "requests": audit.requests,
        "tenants": len(audit.tenants) or None,
        "prompt_tokens": audit.prompt_tokens,
        "answer_tokens": audit.answer_tokens,
        "answered": audit.answered,
        "lengths": {
            name: {f"p{p}": values.percentile(p) for p in PERCENTILES} | {"mean": mean(sum(values.kept), len(values.kept))}
            for name, values in audit.lengths.items()
        },
        "skipped": len(skipped),
        "logged_hit_ratio": mean(audit.logged_cached, audit.logged_prompts),
        "prefix": prefix(audit, kv_bytes, tiers),
        "copying": None,
        "speed_up": None,
        "nothing_to_copy": None,
        "passages": [],
        "machine": None,
    }
    if machine is not None:
        cost = machine.cost
        document["machine"] = {
            "model": machine.info.model,
            "kernels": machine.info.kernels,
            "threads": machine.info.threads,
            "kv_bytes_per_token": machine.info.kv_bytes_per_token,
            "prompt_seconds_per_token": machine.prompt_seconds,
            "step_cost": {name: getattr(cost, name) for name in ("rows", "seconds", "context_seconds", "read_seconds")},
        }
    if audit.followed:
        document["copying"] = copying(audit)
        document["speed_up"] = speed_up(audit)
        document["nothing_to_copy"] = nothing_to_copy(audit)
    if decode is not None:
        document["passages"] = list(told_passages(audit, decode))
    return document


def prefix(audit: Audit, kv_bytes: int | None, tiers: Tiers) -> dict[str, Any] | None:
    """What prefix caches of all sizes would find; None for traces that do not tell."""
    if not audit.with_blocks:
        return None
    size, curve = audit.block_tokens, audit.curve
    points = curve.points()
    thinned = points[:: max(1, len(points) // CURVE_POINTS)]
    thinned += [points[-1]] if points and thinned[-1] != points[-1] else []
    rows, below = [], 0.0
    most = points[-1][0] * size if points else 0
    named = [(name, count, count / kv_bytes) for name, count in tiers.items()] if kv_bytes else []
    for name, count, tokens in named or [("", 0, float(tokens)) for tokens in SIZES if tokens < 4 * most or tokens == SIZES[0]]:
        # a tier below keeps what the one above it drops: together they are one cache of both sizes
        reach = tokens + below if named else tokens
        ratio, before = curve.ratio(reach / size), curve.ratio(below / size) if named and below else 0.0
        rows.append(
            {"tier": name or None, "bytes": count or None, "tokens": int(tokens), "hits": ratio - before, "together": ratio}
        )
        below = reach if named else 0.0
    return {
        "requests": audit.with_blocks,
        "tokens": curve.tokens,
        "block_tokens": size,
        "kv_bytes_per_token": kv_bytes,
        "sampled": audit.rate,
        "unbounded": points[-1][1] if points else 0.0,
        "needed_tokens": points[-1][0] * size if points else 0,
        "tiers": rows,
        "points": [[blocks * size, ratio] for blocks, ratio in thinned],
    }


def copying(audit: Audit) -> dict[str, Any]:
    """Shares of the tokens of answers by length of the match that they followed."""
    found = audit.copying
    total = max(1, found.tokens)
    tables = {
        name: {
            "copyable": found.share(name),
            "seen": [count / total for count in found.seen[name]],
            "right": [count / total for count in found.right[name]],
        }
        for name in found.seen
    }
    return {"answers": audit.followed, "tokens": found.tokens, "lengths": list(BUCKETS), **tables}


def speed_up(audit: Audit) -> dict[str, Any]:
    """What drafts bring while decoding, and of the whole time with prompts that are read."""
    modes: dict[str, Any] = {}
    for mode in MODES:
        total = audit.totals[mode]
        modes[mode] = {
            "speed_up": mean(total.plain, total.seconds),
            "tokens_per_pass": mean(total.tokens, total.passes),
            "drafted": total.drafted,
            "accepted": dict(total.accepted),
            "acceptance": mean(total.accepted.total(), total.drafted),
            "plain_tokens_per_second": mean(total.tokens, total.plain),
            "tokens_per_second": mean(total.tokens, total.seconds),
        }
    return {"modes": modes, "whole": mean(audit.whole["plain"], audit.whole["auto"])}


def nothing_to_copy(audit: Audit) -> dict[str, Any]:
    """The requests that drafts do nothing for, and the latencies of those and of the others, in seconds."""
    latencies = {
        name: {"count": values.seen, **{f"p{p}": values.percentile(p) for p in PERCENTILES}}
        for name, values in sorted(audit.latencies.items())
    }
    return {"requests": audit.nothing, "share": audit.nothing / audit.followed, "latencies": latencies}


def told_passages(audit: Audit, decode: Decode) -> Iterable[dict[str, Any]]:
    """Passages that should stand in front. `hit_gain`: share of all prompt tokens that would be found in the cache besides."""
    prompts = audit.sample.prompts
    total = sum(map(len, prompts))
    for one in passages(prompts, BLOCK_SIZE):
        yield {
            "tokens": len(one.tokens),
            "prompts": one.prompts / len(prompts),
            "position": one.position,
            "hit_gain": one.gain / total,
            "tokens_per_request": one.gain / len(prompts),
            "text": shortened(decode(one.tokens.tolist())),
            "before": decode(one.before.tolist())[-SHOWN // 2 :],
        }


def shortened(text: str) -> str:
    """Its beginning and its end."""
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN * 3 // 4]} … {text[-SHOWN // 4 :]}"


def rerun_json(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of a real run, NaN as null."""
    return [
        {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in dataclasses.asdict(row).items()
        }
        for row in rows
    ]
