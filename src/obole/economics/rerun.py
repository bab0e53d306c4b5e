"""Lookup, a draft model and both on prompts of the log, really run: the same requests under each mode of drafting, in turn."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from obole.engine.engine import Engine
from obole.types import Receipt, SamplingParams

LONGEST = 256  # tokens of an answer


@dataclass(frozen=True, slots=True)
class RerunRow:
    """One mode. Tokens a second are those after the first of each answer. `identical`: to the answers without drafts."""

    mode: str
    requests: int
    tokens_per_second: float
    speed_up: float
    tokens_per_pass: float
    identical: bool


def rerun(
    engine: Engine,
    asked: Sequence[tuple[tuple[int, ...], int]],
    modes: Sequence[str],
    report: Callable[[str, int, int], None],
) -> list[RerunRow]:
    """A row for each mode, the first being that which the others are compared with. `asked`: prompts and lengths of answers.

    Each request has a tenant of its own, so that nothing passes from one to the next.
    """
    receipts: dict[str, list[Receipt]] = {mode: [] for mode in modes}
    answers: dict[str, list[tuple[int, ...]]] = {mode: [] for mode in modes}
    for number, (prompt, length) in enumerate(asked):
        order = modes if number % 2 else modes[::-1]
        for place, mode in enumerate(order):
            report("answering prompts of the log", number * len(modes) + place, len(asked) * len(modes))
            params = SamplingParams(max_tokens=min(length, LONGEST), speculate=mode)
            [result] = engine.generate([prompt], params, tenant=f"audit {secrets.token_hex(8)}")
            receipts[mode].append(result.receipt)
            answers[mode].append(result.token_ids)
    plain = rate(receipts[modes[0]])
    return [
        RerunRow(mode, len(asked), rate(own), rate(own) / plain, per_pass(own), answers[mode] == answers[modes[0]])
        for mode, own in receipts.items()
    ]


def rate(receipts: Sequence[Receipt]) -> float:
    """Tokens a second while decoding; NaN where no answer has more than one token."""
    seconds = sum(r.decode_seconds for r in receipts)
    return sum(max(0, r.output_tokens - 1) for r in receipts) / seconds if seconds else float("nan")


def per_pass(receipts: Sequence[Receipt]) -> float:
    """Tokens after the first for each pass that chose any: a draft brings more than one."""
    tokens = sum(max(0, r.output_tokens - 1) for r in receipts)
    drafted = sum(sum(r.drafted.values()) - sum(r.rejected.values()) for r in receipts)
    return tokens / (tokens - drafted) if tokens > drafted else float("nan")
