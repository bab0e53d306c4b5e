"""Servers as processes of their own, for as long as they are measured."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from obole.bench.client import Address
from obole.errors import ConfigError

HOST = "127.0.0.1"
POLL = 0.05  # seconds between two looks whether it is up
STARTING = 300.0  # seconds: a large model may have to be read from a slow disk
ENDING = 30.0
LAST_WORDS = 2000  # bytes of the log in a message about a server that failed


def free_address() -> Address:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return Address("http", HOST, probe.getsockname()[1])


def obole_command(model: str, address: Address, options: Sequence[str] = ()) -> list[str]:
    """The command of a server that answers at an address, with this very Python."""
    program = [sys.executable, "-c", "from obole.cli.app import main; main()", "serve", model]
    return [*program, "--host", address.host, "--port", str(address.port), *options]


@contextmanager
def serving(command: Sequence[str], address: Address) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server until the end of the block; it is entered once /health says 200. What the server writes is kept in a
    file. Raises `ConfigError` with its last words when it does not come up."""
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error.strerror}.") from None
        try:
            _wait(process, address, log)
            yield process
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], address: Address, log: IO[bytes]) -> None:
    end = time.monotonic() + STARTING
    while not is_up(address):
        if process.poll() is not None:
            raise ConfigError(f"The server ended with status {process.returncode} before it was up: {_tail(log)}")
        if time.monotonic() > end:
            raise ConfigError(f"The server was not up after {STARTING:g} s: {_tail(log)}")
        time.sleep(POLL)


def is_up(address: Address) -> bool:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=5)
    try:
        connection.request("GET", f"{address.path}/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, 2)
    log.seek(max(0, size - LAST_WORDS))
    return log.read().decode("utf-8", "replace").strip() or "it said nothing."
