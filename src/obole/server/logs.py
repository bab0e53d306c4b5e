"""The log: one line on standard error for each request, for people or (`json`) for machines. No prompts unless asked for."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from obole.engine.results import Result
from obole.prices import PriceList, added, plain, tokens_by_kind

Write = Callable[[str], None]


@dataclass(slots=True)
class Record:
    """What is known of one request; filled in on its way. Times: seconds on the monotonic clock."""

    id: str
    method: str
    path: str
    arrived: float
    status: int = 0  # 499: the client left
    tenant: str = "-"
    streamed: bool = False
    first_token: float | None = None
    results: list[Result] = field(default_factory=list)
    error: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # what the client wants to find the request by: user, metadata
    prices: PriceList | None = None
    prompt: Any = None  # only set where prompts are logged
    finished: float = 0.0

    def document(self) -> dict[str, Any]:
        """The record as JSON has it; None and what is empty left out."""
        receipts = [choice.receipt for result in self.results for choice in result.choices]
        sources: Counter[str] = Counter()
        for receipt in receipts:
            sources.update({str(source): count for source, count in receipt.sources.items()})
        made: dict[str, Any] = {
            "request": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "tenant": self.tenant,
            "seconds": round(self.finished - self.arrived, 6),
            "first_token_seconds": None if self.first_token is None else round(self.first_token - self.arrived, 6),
            "stream": self.streamed or None,
        }
        if receipts:
            made |= {
                "prompt_tokens": sum(len(result.prompt_ids) for result in self.results),
                "cached_tokens": sum(result.receipt.cached_tokens for result in self.results),
                "output_tokens": sum(receipt.output_tokens for receipt in receipts),
                "sources": dict(sources),
                **self._bill(),
                "forward_passes": sum(receipt.forward_passes for receipt in receipts),
                "queued_seconds": round(max(receipt.queued_seconds for receipt in receipts), 6),
                "prefill_seconds": round(max(receipt.prefill_seconds for receipt in receipts), 6),
                "decode_seconds": round(max(receipt.decode_seconds for receipt in receipts), 6),
                "finish": [str(choice.finish_reason) for result in self.results for choice in result.choices],
            }
        made |= {"error": self.error, **self.notes, "prompt": self.prompt}
        return {key: value for key, value in made.items() if value not in (None, {}, [])}

    def _bill(self) -> dict[str, Any]:
        """What is to be paid for: tokens by kind, each prompt once, and with a price list what those of each kind cost."""
        choices = [choice for result in self.results for choice in result.choices]
        usage = added(tokens_by_kind(choice.receipt, prompt=choice.index == 0) for choice in choices)
        if self.prices is None:
            return {"usage": usage}
        cost = {kind: plain(self.prices.amount(kind, count)) for kind, count in usage.items()}
        return {"usage": usage, "cost": cost, "currency": self.prices.currency}


class Log:
    """Writes lines. `as_json`: objects, otherwise text. `write` takes one line with its end."""

    def __init__(self, *, as_json: bool, prompts: bool, write: Write | None = None) -> None:
        self.prompts = prompts
        self._as_json = as_json
        self._write = write or _to_stderr

    def request(self, record: Record) -> None:
        document = record.document()
        if self._as_json:
            self._line({"level": "error" if record.status >= 500 else "info", **document})
            return
        words = [document.pop("method"), document.pop("path"), str(document.pop("status"))]
        words += [f"{name}={_short(value)}" for name, value in document.items()]
        self._text(" ".join(words))

    def event(self, message: str, **facts: Any) -> None:
        """Something about the server itself."""
        if self._as_json:
            self._line({"level": "info", "message": message, **facts})
        else:
            self._text(message)

    def failure(self, message: str, trace: str) -> None:
        """Something that should not have happened, with where."""
        if self._as_json:
            self._line({"level": "error", "message": message, "trace": trace})
        else:
            self._text(f"{message}\n{trace}")

    def _line(self, document: dict[str, Any]) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        self._write(msgspec.json.encode({"time": f"{stamp}Z", **document}).decode() + "\n")

    def _text(self, line: str) -> None:
        self._write(f"{time.strftime('%H:%M:%S')} {line}\n")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, str):
        return value if value.isprintable() and " " not in value else repr(value)
    if isinstance(value, dict):
        return ",".join(f"{key}:{item}" for key, item in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


def _to_stderr(line: str) -> None:
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # a log that nobody can read must not end a request
