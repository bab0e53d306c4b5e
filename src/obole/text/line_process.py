"""A helper process that answers JSON objects, one line for one line, and that is ended rather than waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from obole.errors import ModelError

_START_SECONDS = 60.0  # a fresh interpreter on a busy machine
_ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG", "LC_ALL", "LC_TIME")  # not the keys that others hold
_REPLY_BYTES = 1 << 16


class ProcessEndedError(Exception):
    """The process ended over a request, `slow`: because that took longer than it may."""

    def __init__(self, slow: bool) -> None:
        super().__init__("it took too long" if slow else "it ended its process")
        self.slow = slow


class LineProcess:
    """Runs `python -m module`, says `hello` once, then sends requests one at a time; a process that died is started again.

    The module says one line when it is ready (having read `hello`, if there is one), and answers each request with one line
    that repeats its "number". It bounds its own time, of which `seconds` may go into one request; after `patience` seconds
    on the clock it is ended from outside. Safe to use from several threads.

    A process whose exchange was cut short (by Ctrl-C, say) still owes a reply, which belongs to nobody else: it is ended.
    Should one be asked again all the same, the number tells. `purpose`: for messages, "the process for ...".
    """

    def __init__(
        self, module: str, purpose: str, *, seconds: float, patience: float, hello: Mapping[str, Any] | None = None
    ) -> None:
        self._module = module
        self._purpose = purpose
        self._seconds = seconds
        self._patience = patience
        self._hello = b"" if hello is None else json.dumps(hello).encode() + b"\n"
        self._lock = threading.Lock()
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def ask(self, request: Mapping[str, Any], reply_bytes: int = _REPLY_BYTES) -> dict[str, Any]:
        """The reply to a request. Raises `ProcessEndedError` if the process does not survive it or says more than
        `reply_bytes`, `ModelError` if there is no starting it."""
        with self._lock:
            try:
                return self._exchange(request, reply_bytes)
            except BaseException:
                self._stop()
                raise

    def close(self) -> None:
        """Stop the process; the next use starts another."""
        with self._lock:
            self._stop()

    def _exchange(self, request: Mapping[str, Any], reply_bytes: int) -> dict[str, Any]:
        for _ in range(2):  # the process may have died since it was last used: that is not this request's doing
            fresh = self._process is None
            process = self._start() if self._process is None else self._process
            self._number += 1
            line = json.dumps({**request, "number": self._number, "seconds": self._seconds}).encode() + b"\n"
            began = time.monotonic()
            answer = _ask(process, line, reply_bytes, self._patience)
            if answer is not None:
                return self._reply(answer)
            self._stop()
            if time.monotonic() - began >= 0.9 * self._seconds:
                raise ProcessEndedError(slow=True)
            if fresh:
                break
        raise ProcessEndedError(slow=False)

    def _start(self) -> subprocess.Popen[bytes]:
        # -P and an explicit path: nothing is imported from the working directory
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *(path for path in sys.path if path and path != root)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        if _ask(process, self._hello, _REPLY_BYTES, _START_SECONDS) is None:
            raise ModelError(f"The process for {self._purpose} did not start: check the installation and that memory is free.")
        return process

    def _reply(self, answer: bytes) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(answer)
        if reply.get("number") != self._number:
            raise ModelError(f"The process for {self._purpose} gave a reply to another request; it is ended: ask again.")
        return reply

    def _stop(self) -> None:
        finalizer, self._process, self._finalizer = self._finalizer, None, None  # first: this may be interrupted, too
        if finalizer is not None:
            finalizer()


def _ask(process: subprocess.Popen[bytes], line: bytes, limit: int, seconds: float) -> bytes | None:
    """Send a line and read one; None if the process ends, exceeds `limit` bytes, or is ended after `seconds`."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
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
