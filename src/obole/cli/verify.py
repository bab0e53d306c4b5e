"""`obole verify`: the proof that drafts, batches, chunks and caches change no answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole.cli.answering import open_engine
from obole.cli.bench import facts_of
from obole.cli.bench_tables import heading
from obole.cli.failures import FAILURE, guarded
from obole.cli.options import DEFAULT_MODEL, MODEL_HELP, JsonFlag, Revision, with_options
from obole.cli.terminal import print_json, progress_bar
from obole.cli.verify_tables import print_proof

if TYPE_CHECKING:
    from obole.bench.verification import Outcome, Proof


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    way = outcome.way
    return {
        **{f.name: getattr(way, f.name) for f in dataclasses.fields(way)},
        "drafting": way.drafting.name,
        "drafted": outcome.drafted,
        "accepted": outcome.accepted,
        "proved": outcome.proved,
        "fault": outcome.fault or None,
        "difference": None if outcome.difference is None else dataclasses.asdict(outcome.difference),
    }


def proof_json(proof: Proof) -> dict[str, Any]:
    failure = proof.first_failure
    return {
        "proved": proof.proved,
        "first_failure": None if failure is None else outcome_json(failure),
        "prompt_tokens": proof.prompt_tokens,
        "output_tokens": proof.output_tokens,
        "ways": [outcome_json(outcome) for outcome in proof.outcomes],
    }


@guarded
@with_options()
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = DEFAULT_MODEL,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter prompts and answers.")] = False,
    as_json: JsonFlag = False,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Prove that no draft, batch, chunk or cache changes an answer, on this machine and with this model.

    Prompts are asked in every way, and token ids and the bits of log-probabilities compared with those of the plain way: no
    drafts, one at a time, prompts whole, nothing cached. Exit status 1 if anything differs.
    """
    with open_engine(model, revision, settings) as engine, progress_bar() as report:
        from obole.bench.verification import FULL, QUICK
        from obole.bench.verification import verify as prove

        proof = prove(engine, QUICK if quick else FULL, report)
        document = {**facts_of(engine, "verify"), **proof_json(proof)}
    if as_json:
        print_json(document)
    else:
        print(heading(document) + "\n")
        print_proof(proof)
    if not proof.proved:
        raise typer.Exit(FAILURE)
