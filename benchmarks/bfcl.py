"""Tool calls of the Berkeley Function-Calling Leaderboard: all that are required must be right in form.

    pip install 'obole[dev]'
    python benchmarks/bfcl.py [MODEL] --data DIR [--limit N] [--url URL] [--json FILE]

DIR has the leaderboard's BFCL_v4_*.json (Apache-2.0, https://github.com/ShishirPatil/gorilla), JSON lines with `question` and
`function`. Each is asked of `obole serve MODEL`, or of the server at URL, with `tool_choice: required`. Right is a call of a
tool that is there, with arguments that are JSON and that its schema allows: a grammar promises that of any model. Whether it
is the call that was wanted is not looked at. An answer that --max-tokens cuts short can promise nothing and is counted apart,
as are requests whose schemas the server refuses to enforce. Exit status 1 if an answer is wrong, if a request fails, or if
none is right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from obole.bench.answers import told
from obole.bench.client import Address, Client, Reply, address_of
from obole.bench.load import CHAT
from obole.bench.processes import free_address, obole_command, serving
from obole.text.tool_grammar import normalise_schema

try:
    import jsonschema
except ImportError:
    raise SystemExit("bfcl.py checks answers with jsonschema, which is not installed: pip install 'obole[dev]'.") from None

ENDS = ("right", "cut", "refused", "wrong", "failed")


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the leaderboard. `schemas`: of the arguments, by tool."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]

    def body(self, max_tokens: int) -> bytes:
        asked = {"messages": self.messages, "tools": self.tools, "tool_choice": "required", "max_tokens": max_tokens}
        return json.dumps({**asked, "temperature": 0}).encode()


@dataclass(slots=True)
class Tally:
    """How the requests of one file ended; `reasons`: of those that were not right, with the first one of each kind."""

    ends: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: dict[tuple[str, str], str] = field(default_factory=dict)

    def note(self, case: Case, end: str, reason: str = "") -> None:
        self.ends[end] += 1
        if reason:
            self.reasons[end, reason] += 1
            self.first.setdefault((end, reason), case.id)


def cases(path: Path, limit: int | None) -> list[Case]:
    """The first turns of a file's conversations; lines without functions of their own are left out."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [case_of(line) for line in lines if line.get("function")][:limit]


def case_of(line: Mapping[str, Any]) -> Case:
    """A tool that is there twice counts once; types have the names of JSON schema, and tools such as OpenAI's API allows."""
    functions = {re.sub(r"[^a-zA-Z0-9_-]", "_", function["name"])[:64]: function for function in line["function"]}
    schemas = {name: normalise_schema(function["parameters"]) for name, function in functions.items()}
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": function.get("description", ""), "parameters": schemas[name]},
        }
        for name, function in functions.items()
    ]
    return Case(line["id"], line["question"][0], tools, schemas)


def calls_of(case: Case, choice: Mapping[str, Any]) -> list[str]:
    """What is wrong with the calls of a whole answer; nothing if they are right."""
    message = choice["message"]
    if choice["finish_reason"] != "tool_calls" or message["content"] is not None or not message.get("tool_calls"):
        return [f"no calls, but {choice['finish_reason']}"]
    found = []
    for call in message["tool_calls"]:
        name = call["function"]["name"]
        if name not in case.schemas:
            found.append(f"there is no tool {name!r}")
            continue
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError as error:
            found.append(f"arguments are not JSON: {error}")
            continue
        fault = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(case.schemas[name]).iter_errors(arguments))
        if fault is not None:
            found.append(f"arguments are not what the schema says: {fault.message}")
    return found


def judge(case: Case, reply: Reply, tally: Tally) -> None:
    """Count one answer."""
    if reply.problem or reply.status not in (200, 400):
        tally.note(case, "failed", reply.problem or f"{reply.status}: {told(reply.body)}")
        return
    if reply.status == 400:
        tally.note(case, "refused", told(reply.body))
        return
    [choice] = json.loads(reply.body)["choices"]
    if choice["finish_reason"] == "length":
        tally.note(case, "cut")
        return
    faults = calls_of(case, choice)
    tally.calls += len(choice["message"].get("tool_calls") or ())
    tally.note(case, "wrong" if faults else "right", "; ".join(faults))


async def ask(client: Client, asked: Sequence[Case], concurrency: int, max_tokens: int) -> Tally:
    """Send all cases, so many at a time."""
    left, tally = iter(asked), Tally()

    async def work() -> None:
        line = client.line()
        for case in left:
            judge(case, await line.ask(client.request("POST", CHAT, case.body(max_tokens))), tally)
        line.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return tally


def show(tallies: Mapping[str, Tally]) -> None:
    table = Table(box=None)
    for heading in ("", "requests", *ENDS, "calls"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, tally in tallies.items():
        table.add_row(name, str(tally.ends.total()), *(str(tally.ends[end]) for end in ENDS), str(tally.calls))
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
    for name, tally in tallies.items():
        for (end, reason), count in tally.reasons.most_common():
            print(f"{name}: {count} {end}, such as {tally.first[end, reason]}: {reason[:300]}")


@contextmanager
def server(options: argparse.Namespace) -> Iterator[Address]:
    """Where to ask: the server that was named, or one for the model."""
    if options.url:
        yield address_of(options.url)
        return
    address = free_address()
    with serving(obole_command(options.model, address, options.obole_args), address):
        yield address


def parse() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", default="smollm2-135m")
    arguments.add_argument("--data", type=Path, required=True, metavar="DIR")
    arguments.add_argument("--url", help="a server that is there already")
    arguments.add_argument("--limit", type=int, metavar="N", help="only the first N of each file")
    arguments.add_argument("--concurrency", type=int, default=8)
    arguments.add_argument("--max-tokens", type=int, default=512)
    arguments.add_argument("--obole-args", type=shlex.split, default=[], metavar="'...'")
    arguments.add_argument("--json", type=Path, metavar="FILE")
    options = arguments.parse_args()
    options.files = sorted(options.data.glob("BFCL_v4_*.json"))
    if not options.files:
        arguments.error(f"{options.data} has no BFCL_v4_*.json")
    return options


def main() -> None:
    options = parse()
    asked = {path.stem.removeprefix("BFCL_v4_"): cases(path, options.limit) for path in options.files}
    tallies: dict[str, Tally] = {}
    with server(options) as address:
        client = Client(address, os.environ.get("OBOLE_API_KEY", ""))
        for name, some in asked.items():
            if some:
                print(f"{name}: {len(some)} requests", file=sys.stderr)
                tallies[name] = asyncio.run(ask(client, some, options.concurrency, options.max_tokens))
    show(tallies)
    ends = sum((tally.ends for tally in tallies.values()), Counter())
    if options.json is not None:
        rows = [{"file": name, "calls": t.calls, **{end: t.ends[end] for end in ENDS}} for name, t in tallies.items()]
        options.json.write_text(json.dumps({"model": options.url or options.model, "rows": rows}, indent=1) + "\n")
    sys.exit(1 if ends["wrong"] or ends["failed"] or not ends["right"] else 0)


if __name__ == "__main__":
    main()
