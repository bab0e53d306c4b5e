"""Servers as processes of their own, for as long as they are measured."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from obole.bench.client import Address
from obole.errors import ConfigError

HOST = "127.0.0.1"
POLL = 0.05  # seconds between two looks whether it is up
STARTING = 300.0  # seconds: a large model may have to be read from a slow disk
ENDING = 30.0
LAST_WORDS = 2000  # characters of the log in a message about a server that failed


def free_address() -> Address:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return Address("http", HOST, probe.getsockname()[1])


def obole_command(model: str, address: Address, options: Sequence[str] = ()) -> list[str]:
    """The command of a server that answers at an address, with this very Python."""
    program = [sys.executable, "-c", "from obole.cli.app import main; main()", "serve", model]
    return [*program, "--host", address.host, "--port", str(address.port), *options]


@dataclass(frozen=True, slots=True)
class Running:
    """A server process, and a file with all that it wrote."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def written(self) -> str:
        # the server writes where this file stands: reading must not move it
        return os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0).decode("utf-8", "replace")

    def stop(self) -> int:
        """Ask it to end, and wait for that; its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def serving(command: Sequence[str], address: Address) -> Iterator[Running]:
    """Runs a server until the end of the block; it is entered once /health says 200. Raises `ConfigError` with the server's
    last words when it does not come up."""
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error.strerror}.") from None
        running = Running(process, log)
        try:
            _wait(running, address)
            yield running
        finally:
            running.stop()


def _wait(running: Running, address: Address) -> None:
    end = time.monotonic() + STARTING
    while not is_up(address):
        status = running.process.poll()
        if status is not None or time.monotonic() > end:
            problem = f"was not up after {STARTING:g} s" if status is None else f"ended with status {status} before it was up"
            raise ConfigError(f"The server {problem}: {running.written()[-LAST_WORDS:].strip() or 'it said nothing.'}")
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
