"""The findings of an audit as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from obole.cli.bench_tables import number, print_table
from obole.cli.receipts import plural, size
from obole.cli.terminal import CONTROLS

Document = Mapping[str, Any]
NAMES = {"lookup": "its own text", "memory": "earlier requests", "auto": "both"}


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def maybe(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else number(value * scale)


def audit_tables(found: Document) -> None:
    """All that there is, one table after another."""
    kinds = ", ".join(f"{count:,} of {kind}" for kind, count in found["kinds"].items())
    words = f"{found['prompt_tokens']:,} tokens of prompts, {found['answer_tokens']:,} of answers"
    print(f"{plural(found['requests'], 'request')} ({kinds}) · {words}")
    if found["logged_hit_ratio"] is not None:
        print(f"cached by the log's own account: {percent(found['logged_hit_ratio'])} % of the tokens of prompts")
    for name, about in (
        ("foreign_conversations", "conversations that the model's template does not take were read as plain text"),
        ("answers_without_request", "answers have no request"),
    ):
        if found.get(name):
            print(f"{found[name]:,} {about}")
    print()
    print_table(
        ("tokens of a", "mean", "p50", "p90", "p99"),
        [(name, *(maybe(row[key]) for key in ("mean", "p50", "p90", "p99"))) for name, row in found["lengths"].items()],
    )
    prefix_table(found["prefix"])
    if found["copying"] is not None:
        copying_tables(found)
    passage_lines(found["passages"])
    if found.get("replay"):
        replay_table(found["replay"])


def prefix_table(found: Document | None) -> None:
    print()
    if found is None:
        print("prefix caches: this trace does not tell which prompts begin alike")
        return
    unbounded = f"{percent(found['unbounded'])} % of the tokens of prompts, of {found['needed_tokens']:,} tokens"
    sampled = "" if found["sampled"] == 1 else f" · from a sample of {percent(found['sampled'])} % of the blocks"
    print(f"prefix caches find at most {unbounded} (blocks of {found['block_tokens']}){sampled}")
    print_table(
        ("cache", "size", "tokens", "hits %", "with those above %"),
        [
            (
                row["tier"] or "any",
                "" if row["bytes"] is None else size(row["bytes"]),
                f"{row['tokens']:,}",
                percent(row["hits"]),
                percent(row["together"]),
            )
            for row in found["tiers"]
        ],
    )


def copying_tables(found: Document) -> None:
    copied, speed = found["copying"], found["speed_up"]
    print(f"\n{plural(copied['answers'], 'answer')} followed, {copied['tokens']:,} tokens; % of them by the match before")
    print_table(
        ("tokens of the match", *copied["lengths"], "any"),
        [
            (f"{about}, {what}", *map(percent, copied[name][key]), percent(sum(copied[name][key])))
            for name, about in (("own", "its own text"), ("memory", "earlier requests"), ("both", "longer of both"))
            for key, what in (("seen", "a match"), ("right", "copyable"))
        ],
    )
    print("\nexpected of drafts on this machine, one request at a time")
    print_table(
        ("drafts from", "tokens/s without", "with", "times faster", "tokens a pass", "accepted %"),
        [
            (
                NAMES[mode],
                maybe(row["plain_tokens_per_second"]),
                maybe(row["tokens_per_second"]),
                maybe(row["speed_up"]),
                maybe(row["tokens_per_pass"]),
                percent(row["acceptance"]),
            )
            for mode, row in speed["modes"].items()
        ],
    )
    print(f"with the prompts that must be read: {maybe(speed['whole'])} times faster")
    nothing = found["nothing_to_copy"]
    print(f"\n{percent(nothing['share'])} % of the answers have no passage to copy; what to promise, in milliseconds")
    print_table(
        ("", "answers", "p50", "p90", "p99"),
        [
            (name, f"{row['count']:,}", *(maybe(row[p], 1e3) for p in ("p50", "p90", "p99")))
            for name, row in nothing["latencies"].items()
        ],
    )


def passage_lines(found: list[Document]) -> None:
    if not found:
        return
    print("\ntext that many prompts have, but not in front; there it would be found in the prefix cache")
    print_table(
        ("hits %", "tokens a request", "tokens", "% of prompts", "after tokens", "text"),
        [
            (
                f"+{percent(one['hit_gain'])}",
                number(one["tokens_per_request"]),
                f"{one['tokens']:,}",
                percent(one["prompts"]),
                f"{one['position']:,}",
                one["text"][:60].replace("\n", "⏎").translate(CONTROLS),
            )
            for one in found
        ],
    )


def replay_table(rows: list[Document]) -> None:
    print(f"\n{plural(rows[0]['requests'], 'prompt')} of the log really answered")
    print_table(
        ("drafts", "tokens/s", "times faster", "tokens a pass", "identical"),
        [
            (
                row["mode"],
                maybe(row["tokens_per_second"]),
                maybe(row["speed_up"]),
                maybe(row["tokens_per_pass"]),
                "yes" if row["identical"] else "NO",
            )
            for row in rows
        ],
    )
