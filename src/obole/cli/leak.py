"""`obole leak`: what sizes and times of streams give away to who sees the network, with pacing and without."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from obole.cli.bench import check_file, show
from obole.cli.bench_serve import ApiKey, Extra, IgnoreEos, ModelName, at_address, extra_fields, is_url
from obole.cli.bench_tables import number, print_table
from obole.cli.failures import guarded
from obole.cli.options import DEFAULT_MODEL, MODEL_HELP, Revision, WrongUsage, option_of, with_options
from obole.cli.terminal import progress_bar
from obole.cli.top import KEY
from obole.economics.leak import bytes_of, chance, told_apart
from obole.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from obole.bench.client import Client
    from obole.bench.load import Load
    from obole.bench.observe import Secret, Sight
    from obole.bench.samples import Report

LEAST = 4  # secrets of each label


@guarded
@with_options()
def leak(
    target: Annotated[
        str, typer.Argument(metavar="URL|MODEL", help=f"A server that is there, or a model to be served. {MODEL_HELP}")
    ] = DEFAULT_MODEL,
    prompts: Annotated[int, typer.Option(metavar="N", help="Secret prompts of each label.")] = 8,
    pace: Annotated[float, typer.Option(metavar="R", help="Tokens a second of paced streams.")] = 10.0,
    output_tokens: Annotated[int, typer.Option(min=8, metavar="N", help="Tokens of an answer.")] = 24,
    at_once: Annotated[int, typer.Option(min=1, metavar="N", help="Requests at a time; more of them disturb each other.")] = 2,
    question: Annotated[
        str, typer.Option(metavar="NAME,...", help="What the observer wants to know: copied, cached, topic.")
    ] = "copied,cached,topic",
    ignore_eos: IgnoreEos = True,
    model_name: ModelName = None,
    extra: Extra = "{}",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the prompts.")] = 0,
    api_key: ApiKey = None,
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write a document to FILE; - is standard output, in place of the table."),
    ] = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Play the observer of the network: what do sizes and times of encrypted streams tell of secret prompts?

    Whether an answer was copied from its prompt, whether its prompt was cached, and which topic it has. A classifier learns
    from some streams and is tried on others: an AUC of 1 is certainty, 0.5 is a guess. Then the same with pace.
    """
    if is_url(target) and (settings or revision):
        name = next(iter(settings), "revision")
        raise WrongUsage(name, f"{option_of(name)} is for a server that is started here: name a model in place of the URL.")
    if prompts < LEAST:
        raise InvalidRequest("prompts", f"prompts must be at least {LEAST}, not {prompts}: fewer teach a classifier nothing.")
    if not 0 < pace <= 1000:
        raise InvalidRequest("pace", f"pace must be above 0 and at most 1000 tokens a second, not {pace}.")
    check_file(as_json)
    names = question.replace(" ", "").split(",")
    from obole.bench.client import Client
    from obole.bench.load import Load
    from obole.bench.machine import this_machine
    from obole.bench.report import circumstances
    from obole.bench.secrets import questions

    questions(names, 1, 0, {})  # refuses unknown ones before anything is started
    load = Load(output_tokens=output_tokens, ignore_eos=ignore_eos, model_name=model_name, extra=extra_fields(extra), seed=seed)
    with at_address(target, revision, settings) as address, progress_bar() as report:
        rows = measured(Client(address, api_key or os.environ.get(KEY, "")), load, names, prompts, pace, at_once, report)
    document = {**circumstances("leak", this_machine()), "model": target, "prompts": prompts, "pace": pace}
    document |= {"output_tokens": output_tokens, "at_once": at_once, "rows": rows}
    show(as_json, document, lambda: leak_table(rows, pace))


def measured(
    client: Client, load: Load, names: Sequence[str], count: int, pace: float, at_once: int, report: Report
) -> list[dict[str, Any]]:
    """A row for each question. Paced and unpaced streams are asked for in turn, so that the machine is the same for both."""
    from obole.bench.observe import observe
    from obole.bench.secrets import questions

    draws = np.random.default_rng(load.seed)
    pairs = list(
        zip(questions(names, count, load.seed, {}), questions(names, count, load.seed + 1, {"pace": pace}), strict=True)
    )
    total, done = sum(len(one.secrets) for pair in pairs for one in pair), 0

    def seen() -> None:
        nonlocal done
        done += 1
        report("observing", done, total)

    rows = []
    warm: Sequence[Secret] = [pair.secrets[0] for both in pairs for pair in both]
    good(client, observe(client, load, warm, at_once, lambda: None))
    for plain, paced in pairs:
        sights = {}
        for name, question in (("unpaced", plain), ("paced", paced)):
            order = [question.secrets[i] for i in draws.permutation(len(question.secrets))]
            sights[name] = good(client, observe(client, load, order, at_once, seen))
        rows.append({"question": plain.name, **row_of(sights)})
    return rows


def good(client: Client, sights: Sequence[Sight]) -> Sequence[Sight]:
    """Raises `ConfigError` for the first that failed: a part of the secrets would be another question."""
    for sight in sights:
        if sight.problem:
            raise ConfigError(f"{client.address.url} cannot be observed: {sight.problem.rstrip('.')}.")
    return sights


def row_of(sights: Mapping[str, Sequence[Sight]]) -> dict[str, Any]:
    """AUC of each kind of stream, and what pacing costs: medians of latencies, and bytes."""
    found: dict[str, Any] = {}
    for name, seen in sights.items():
        labels = [sight.label for sight in seen]
        found[f"auc_{name}"] = told_apart([sight.reads for sight in seen], labels)
        found[f"first_token_{name}_milliseconds"] = 1e3 * float(np.median([s.first_token_seconds for s in seen]))
        found[f"whole_answer_{name}_milliseconds"] = 1e3 * float(np.median([s.whole_seconds for s in seen]))
        found[f"bytes_{name}"] = float(np.mean([bytes_of(s.reads) for s in seen]))
        found[f"reads_{name}"] = float(np.mean([len(s.reads) for s in seen]))
    count = sum(label == labels[0] for label in labels)
    return {"streams": len(labels), "labels": len(set(labels)), "chance": chance(count, len(labels) - count), **found}


def leak_table(rows: Sequence[Mapping[str, Any]], pace: float) -> None:
    print_table(
        ("what the observer tells", "streams", "AUC", "with pace", "chance gives up to"),
        [
            (r["question"], f"{r['streams']}", f"{r['auc_unpaced']:.2f}", f"{r['auc_paced']:.2f}", f"{r['chance']:.2f}")
            for r in rows
        ],
    )
    print()
    print_table(
        (f"cost of {pace:g} tokens/s", "first token ms", "paced", "whole answer ms", "paced", "bytes", "paced", "times"),
        [
            (
                r["question"],
                *(number(r[f"{key}_{name}"]) for key, name in _cost_keys()),
                f"{r['bytes_paced'] / r['bytes_unpaced']:.2f}",
            )
            for r in rows
        ],
    )


def _cost_keys() -> list[tuple[str, str]]:
    times = [(key, f"{name}_milliseconds") for key in ("first_token", "whole_answer") for name in ("unpaced", "paced")]
    return [*times, ("bytes", "unpaced"), ("bytes", "paced")]
