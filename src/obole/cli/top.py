"""`obole top`: what a server is doing, read from its /metrics each second."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from obole.cli.failures import guarded
from obole.cli.options import JsonFlag, WrongUsage
from obole.cli.terminal import print_json
from obole.cli.top_figures import Figures, Snapshot, figures, figures_json, read_samples, read_snapshot, restarted
from obole.errors import OboleError

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

KEY = "OBOLE_API_KEY"
TIMEOUT = 5.0  # seconds
LARGEST = 16 << 20  # bytes of a page of metrics
WINDOW = 60.0  # seconds that shares and latencies are of


class Unreachable(OboleError):
    """No figures can be had from the server."""


class Remote:
    """A server somewhere else, seen from outside."""

    def __init__(self, url: str, key: str) -> None:
        """Raises `WrongUsage` for what is no http URL."""
        self.url = _address(url)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def snapshot(self) -> Snapshot:
        """The counters now. Raises `Unreachable` with what to do about it."""
        return self._figures(lambda text: read_snapshot(text, time.monotonic()))

    def samples(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and values of one metric. Raises `Unreachable`."""
        return self.all_samples().get(name, [])

    def all_samples(self) -> dict[str, list[tuple[Mapping[str, str], float]]]:
        """Labels and values by name. Raises `Unreachable`."""
        return self._figures(read_samples)

    def _figures(self, read: Callable[[str], T]) -> T:
        try:
            return read(self._get("/metrics").decode("utf-8"))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 401:
                raise Unreachable(f"{self.url} wants an API key that it knows: give --api-key, or set {KEY}.") from None
            raise Unreachable(f"{self.url}/metrics answers with status {error.code}: is that a server of obole?") from None
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            problem = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise Unreachable(f"There is no server at {self.url} ({problem}): start one with obole serve.") from None
        except (http.client.HTTPException, ValueError):
            raise Unreachable(f"{self.url}/metrics has no figures of obole: is another program listening there?") from None

    def health(self) -> str:
        """ "ok", or why requests are refused."""
        try:
            return str(json.loads(self._get("/health"))["status"])
        except urllib.error.HTTPError as error:
            with error:
                return _status(error.read(LARGEST))
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return "unknown"

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            content: bytes = response.read(LARGEST)
            return content


def _address(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        fit = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        fit = False
    if not fit or not url.isprintable() or " " in url:
        raise WrongUsage("url", f"{url!r} is not the address of a server: write it like http://127.0.0.1:8000.")
    return urllib.parse.urlunsplit(parts).rstrip("/")


def _status(body: bytes) -> str:
    """The state that a refusal of /health tells."""
    try:
        return str(json.loads(body)["status"])
    except (ValueError, KeyError, TypeError):
        return "unknown"


class Watch:
    """The snapshots of the last minute."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._seen: deque[Snapshot] = deque()
        self.paces: deque[float] = deque(maxlen=int(WINDOW))
        self.health = ""
        self.problem = ""

    def look(self) -> Figures | None:
        """Ask the server; the figures since the last time, None at first and while it cannot be reached."""
        try:
            now, self.health, self.problem = self._remote.snapshot(), self._remote.health(), ""
        except Unreachable as error:
            self.problem = str(error)
            self._seen.clear()
            return None
        if self._seen and restarted(now, self._seen[-1]):
            self._seen.clear()
        self._seen.append(now)
        while self._seen[0].at < now.at - WINDOW:
            self._seen.popleft()
        if len(self._seen) < 2:
            return None
        shown = figures(now, self._seen[-2], self._seen[0])
        self.paces.append(shown.tokens_per_second)
        return shown


def once(remote: Remote, interval: float) -> Figures:
    """Rates over one interval, everything else since the server's start."""
    before = remote.snapshot()
    time.sleep(interval)
    return figures(remote.snapshot(), before, Snapshot(at=0.0))


def keep_watching(remote: Remote, interval: float) -> None:
    """Redraw until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from obole.cli.top_screen import screen

    watch = Watch(remote)
    remote.snapshot()  # a server that is not there is an error; one that goes away later is news

    def drawn(shown: Figures | None) -> RenderableType:
        return screen(remote.url, watch.health, watch.problem, shown, list(watch.paces))

    try:
        with Live(drawn(watch.look()), console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(drawn(watch.look()), refresh=True)
    except KeyboardInterrupt:
        return


@guarded
def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the server is.")] = "http://127.0.0.1:8000",
    single: Annotated[bool, typer.Option("--once", help="Print the figures once and leave.")] = False,
    interval: Annotated[float, typer.Option(metavar="X", min=0.1, max=60.0, help="Seconds between two looks.")] = 1.0,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help=f"Of the server. Or set {KEY}.", show_default="none")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Watch a server: requests, tokens per second by source, cache hits, drafts accepted, latencies.

    Shares and latencies are of the last minute; with --once and --json, of all the time since the server was started.
    """
    remote = Remote(url, api_key or os.environ.get(KEY, ""))
    if not (single or as_json or sys.stdout.isatty()):
        raise WrongUsage("once", "Standard output is no terminal to draw on: add --once or --json.")
    if not (single or as_json):
        keep_watching(remote, interval)
        return
    shown = once(remote, interval)
    health = remote.health()
    if as_json:
        print_json(figures_json(shown, remote.url, health))
        return
    from rich.console import Console

    from obole.cli.top_screen import screen

    Console(highlight=False).print(screen(remote.url, health, "", shown, []))
