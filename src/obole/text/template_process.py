"""The process in which chat templates are rendered, seen from the engine's side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from obole.errors import InvalidRequest, ModelError

_START_SECONDS = 60.0  # a fresh interpreter on a busy machine
_GRACE_SECONDS = 2.0  # the process ends itself at its limit; after this it is ended from outside
_ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG", "LC_ALL", "LC_TIME")  # not the keys that others hold
_BYTES_PER_CHARACTER = 12  # a character outside the basic plane, escaped as two surrogates in JSON


class TemplateProcess:
    """Renders templates one at a time, in at most `seconds` each; a process that died is started again.

    A process whose exchange was cut short (by Ctrl-C, say) still owes a reply, which belongs to nobody else: it is ended.
    Should one be asked again all the same, the number of each request, which its reply repeats, tells.

    The text may be `growth` times as long as what goes in, and always 2**20 characters. Safe to use from several threads.
    """

    def __init__(self, seconds: float = 5.0, growth: int = 8) -> None:
        self._seconds = seconds
        self._growth = growth
        self._lock = threading.Lock()
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def render(self, template: str, context: dict[str, Any]) -> str:
        """The text of a template. Raises `InvalidRequest` (field "messages") if the template refuses its input or
        fails on it, `ModelError` if it does not compile or breaks a limit."""
        request: dict[str, Any] = {"template": template, "context": context, "seconds": self._seconds}
        size = len(template) + len(json.dumps(context, ensure_ascii=False))
        characters = request["characters"] = max(1 << 20, self._growth * size)
        with self._lock:
            try:
                reply = self._exchange(request, characters * _BYTES_PER_CHARACTER)
            except BaseException:
                self._stop()
                raise
        if "text" in reply:
            return str(reply["text"])
        kind, message = reply.get("error"), reply.get("message")
        if kind == "raised":
            raise InvalidRequest("messages", f"The model's chat template refuses these messages: {message}")
        if kind == "render":
            raise InvalidRequest("messages", f"The model's chat template cannot render these messages ({message}).")
        problem = "does not compile" if kind == "template" else "is not safe to run"
        raise ModelError(f"The model's chat template {problem} ({message}): give the model a plain prompt (--raw).")

    def close(self) -> None:
        """Stop the process; the next use starts another."""
        with self._lock:
            self._stop()

    def _exchange(self, request: dict[str, Any], limit: int) -> dict[str, Any]:
        for _ in range(2):  # the process may have died since it was last used: that is not the template's doing
            fresh = self._process is None
            process = self._start() if self._process is None else self._process
            self._number += 1
            line = json.dumps(request | {"number": self._number}).encode() + b"\n"
            began = time.monotonic()
            answer = _ask(process, line, limit, self._seconds + _GRACE_SECONDS)
            if answer is not None:
                return _reply(answer, self._number)
            self._stop()
            if time.monotonic() - began >= self._seconds * 0.9:
                return {"error": "hostile", "message": f"it took more than {self._seconds:g} seconds"}
            if fresh:
                break
        return {"error": "hostile", "message": "it ended the process that rendered it"}

    def _start(self) -> subprocess.Popen[bytes]:
        # -P and an explicit path: nothing is imported from the working directory
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *(path for path in sys.path if path and path != root)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "obole.text.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        if _ask(process, b"", 16, _START_SECONDS) is None:
            raise ModelError("The process for chat templates did not start: check that jinja2 is installed and memory is free.")
        return process

    def _stop(self) -> None:
        finalizer, self._process, self._finalizer = self._finalizer, None, None  # first: this may be interrupted, too
        if finalizer is not None:
            finalizer()


def _reply(answer: bytes, number: int) -> dict[str, Any]:
    """The reply to request `number`. Raises `ModelError` if it is one to another."""
    reply: dict[str, Any] = json.loads(answer)
    if reply.get("number") != number:
        raise ModelError("The process for chat templates gave a reply to another request; it is ended: ask again.")
    return reply


def _ask(process: subprocess.Popen[bytes], line: bytes, limit: int, seconds: float) -> bytes | None:
    """Send a line and read one; None if the process ends, exceeds `limit` bytes, or is ended after `seconds`."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    try:
        timer.start()
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline(limit)
    except OSError:
        return None
    finally:
        timer.cancel()
    return answer if answer.endswith(b"\n") else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue
    process.wait()
