"""`obole bench gate`: whether a benchmark became slower, or an answer another one. For continuous integration."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from obole.cli.bench import JsonFile, check_file, show
from obole.cli.bench_open import read_document
from obole.cli.bench_serve_tables import verdict_table
from obole.cli.failures import FAILURE, guarded
from obole.cli.options import WrongUsage
from obole.cli.terminal import stderr
from obole.errors import ConfigError, InvalidRequest

PROGRAM = (sys.executable, "-c", "from obole.cli.app import main; main()", "bench")


@guarded
def gate(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE.json", help="What obole bench wrote with --json.")],
    new: Annotated[
        Path | None,
        typer.Argument(metavar="NEW.json", help="A later document.", show_default="the same benchmark, run now"),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="How much slower is let through, beside noise; 0.05 is 5 %.")
    ] = 0.05,
    as_json: JsonFile = None,
) -> None:
    """Exit with status 1 on a slowdown beyond noise and tolerance, or where answers have other tokens.

    Runs what the baseline describes once more, with the same settings, or compares it with NEW.json.
    """
    if not 0 <= tolerance < 10:
        raise WrongUsage("tolerance", f"tolerance must be a share from 0, such as 0.05, not {tolerance}.")
    check_file(as_json)
    before = read_document(baseline)
    check_repeats(before, str(baseline))
    now = again(before) if new is None else read_document(new)
    check_repeats(now, str(new) if new is not None else "The new run")
    document, passed = judged(before, now, tolerance)
    show(as_json, document, lambda: gate_table(document))
    if not passed:
        raise typer.Exit(FAILURE)


def check_repeats(document: Mapping[str, Any], name: str) -> None:
    from obole.bench.compare import LEAST

    repeat = document.get("repeat")
    if not isinstance(repeat, int) or repeat < LEAST:
        raise InvalidRequest(
            "baseline",
            f"{name} has fewer than {LEAST} repetitions, which tell nothing of noise: measure with --repeat {LEAST}.",
        )


def again(before: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document of the same command, run now by this very program. Its progress and errors go where ours go."""
    command = before.get("command")
    if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
        raise InvalidRequest(
            "baseline", "The baseline does not say how it was measured: measure it anew, or give NEW.json too."
        )
    with tempfile.TemporaryDirectory(prefix="obole-gate-") as folder:
        path = Path(folder, "new.json")
        done = subprocess.run([*PROGRAM, *command, "--json", str(path)], stdout=subprocess.DEVNULL, check=False)
        if done.returncode or not path.exists():
            raise ConfigError(f"The benchmark ended with status {done.returncode}: obole bench {' '.join(command)}.")
        return read_document(path)


def judged(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float) -> tuple[dict[str, Any], bool]:
    """The document of the verdicts, and whether all is well."""
    from obole.bench.compare import WORSE, bits, compare

    changes, same = compare(before, now, tolerance), bits(before, now)
    passed = same.same is not False and not any(change.verdict == WORSE for change in changes)
    machine = {name: now[name] for name in ("machine", "date", "versions", "model") if name in now}
    return {
        "benchmark": "gate",
        **machine,
        "of": before["benchmark"],
        "tolerance": tolerance,
        "passed": passed,
        "other_machine": before.get("machine") != now.get("machine"),
        "bits": asdict(same),
        "changes": [asdict(change) for change in changes],
    }, passed


def gate_table(document: Mapping[str, Any]) -> None:
    from obole.bench.compare import Change

    changes = [Change(**change) for change in document["changes"]]
    verdict_table(sorted(changes, key=lambda change: ("worse", "unsure", "better", "same").index(change.verdict)))
    bits = document["bits"]
    told = {True: "the same", False: f"others: {bits['why']}", None: f"not compared: {bits['why']}"}[bits["same"]]
    print(f"\nanswers: {told}")
    if document["other_machine"]:
        stderr().print("note: the baseline is of another machine, or of another state of it", soft_wrap=True)
    slower = sum(change.verdict == "worse" for change in changes)
    print(f"{'passed' if document['passed'] else 'FAILED'}: {slower} of {len(changes)} figures slower")
