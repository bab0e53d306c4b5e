"""The matrix of `obole verify`: a row for each source of drafts, a column for each way of asking."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rich.text import Text

from obole.cli.bench_tables import print_table
from obole.cli.receipts import plural
from obole.cli.terminal import stderr

if TYPE_CHECKING:
    from obole.bench.verification import Outcome, Proof, Spot


def print_proof(proof: Proof) -> None:
    """The matrix on standard output; below it what was compared or, on standard error, what failed first."""
    rows: dict[tuple[str, bool], list[str]] = {}
    for outcome in proof.outcomes:
        rows.setdefault((outcome.way.drafting.name, outcome.way.sampled), []).append(cell(outcome))
    columns = ["\n".join(words) for words in itertools.product(("alone", "batched"), ("whole", "chunked"), ("cold", "cached"))]
    print_table(
        ("drafts", *columns),
        [(f"{name}, {'sampled' if sampled else 'greedy'}", *cells) for (name, sampled), cells in rows.items()],
    )
    lengths = proof.prompt_tokens.values()
    asked = f"{plural(len(lengths), 'prompt')} of {min(lengths)} to {max(lengths)} tokens, {proof.output_tokens} of each answer"
    print(f"\n{asked}; ✓ the bits of the plain answer, ✗ others; tokens accepted of those drafted")
    if (failure := proof.first_failure) is not None:
        stderr().print(Text.assemble(("error:", "bold red"), " ", failure_text(failure)), soft_wrap=True)


def cell(outcome: Outcome) -> str:
    """ "✓ 45/312"; "✗" for answers that differ, "?" where nothing is proved."""
    mark = "✓" if outcome.proved else "✗" if outcome.difference is not None else "?"
    return f"{mark} {outcome.accepted:,}/{outcome.drafted:,}" if outcome.drafted else mark


def failure_text(outcome: Outcome) -> str:
    """What went wrong in one way of asking, as a sentence."""
    from obole.bench.verification import describe

    where = describe(outcome.way)
    if (found := outcome.difference) is None:
        return f"{where}: this proves nothing, since {outcome.fault}."
    return (
        f"{where}: the answer to the prompt {found.prompt!r} differs at token {found.position}: "
        f"expected {spot_text(found.expected)}, got {spot_text(found.got)}."
    )


def spot_text(spot: Spot) -> str:
    """ "token 318 ' is' (log-probability -0.25; then 11: -2.5)", with all digits."""
    if spot.token_id is None:
        return f"the end ({spot.ended})"
    others = "".join(f"; {token}: {logprob!r}" for token, logprob in spot.alternatives)
    return f"token {spot.token_id} {spot.text!r} (log-probability {spot.logprob!r}{others})"
