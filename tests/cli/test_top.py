"""`obole top`: figures from a server's own page of metrics, and what is said when there is none."""

from __future__ import annotations

import http.server
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st

from obole.cache.tiers.reuse import ReuseEstimator
from obole.cli import top_screen
from obole.cli.top_figures import Histogram, Snapshot, figures, read_snapshot, restarted, sparkline
from obole.engine.results import Delta
from obole.server.metrics import Metrics
from obole.types import Source

BUSY = SimpleNamespace(running=3, waiting=2, blocks_used=25, blocks_total=100)


def news_of(sources: list[Source]) -> Delta:
    return Delta(0, "", tuple(range(len(sources))), sources=tuple(sources))


def metrics() -> Metrics:
    """Of a server that has worked a little."""
    made = Metrics(SimpleNamespace(snapshot=lambda: BUSY, tier_stats=lambda: None, reuse=ReuseEstimator().value))
    made.tokens(news_of([Source.MODEL] * 60 + [Source.LOOKUP] * 40))
    made.drafted.labels("lookup").inc(80)
    made.accepted.labels("lookup").inc(40)
    made.queries.inc(200)
    made.hits.inc(150)
    for seconds in (0.02, 0.03, 0.04, 3.0):
        made.first.observe(seconds)
    return made


@dataclass
class Canned:
    """A server that answers GET by path: (status, body)."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Canned]:
    canned = Canned({"/health": (200, b'{"status":"ok"}')})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            canned.keys.append(self.headers.get("authorization"))
            status, body = canned.answers.get(self.path, (404, b"{}"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        canned.url = f"http://127.0.0.1:{listening.server_address[1]}"
        yield canned
        listening.shutdown()
        thread.join()


def test_a_snapshot_of_the_real_page() -> None:
    snapshot = read_snapshot(metrics().page().decode(), 5.0)
    assert (snapshot.at, snapshot.running, snapshot.waiting, snapshot.kv_usage) == (5.0, 3, 2, 0.25)
    assert set(snapshot.generated) == {str(source) for source in Source}
    assert (snapshot.generated["model"], snapshot.accepted, snapshot.drafted) == (60.0, {"lookup": 40.0}, {"lookup": 80.0})
    assert (snapshot.prompt_tokens, snapshot.cached_tokens) == (200.0, 150.0)
    assert snapshot.latencies["first_token"].total == 4.0
    for name, histogram in snapshot.latencies.items():
        assert histogram.bounds[-1] == math.inf, name


def test_figures_are_differences() -> None:
    counting = metrics()
    before = read_snapshot(counting.page().decode(), 10.0)
    counting.tokens(news_of([Source.MEMORY] * 30))
    counting.drafted.labels("memory").inc(40)
    counting.accepted.labels("memory").inc(30)
    counting.queries.inc(100)
    counting.hits_by_tier.labels("ssd").inc(25)
    now = read_snapshot(counting.page().decode(), 12.0)
    recent, whole = figures(now, before, before), figures(now, before, Snapshot(at=0.0))
    assert recent.tokens_per_second == whole.tokens_per_second == recent.by_source["memory"] == 15.0
    assert (recent.cache_hit_rate, whole.cache_hit_rate) == (0.0, 0.5)
    assert recent.hits_by_tier["ssd"] == 0.25
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    console.print(top_screen.rates(recent, [1.0]))
    assert "25% ssd" in console.export_text()
    assert recent.acceptance == {"lookup": None, "memory": 0.75}
    assert whole.acceptance == {"lookup": 0.5, "memory": 0.75}
    assert recent.latencies["first_token"]["p50"] is None
    assert whole.latencies["first_token"]["p50"] == pytest.approx(0.025 + 0.025 / 2)
    assert not restarted(now, before)
    assert restarted(before, now)


@pytest.mark.parametrize("text", ["", "# nothing\n", "other_metric 1\n", "<html>", "obole_num_requests_running x\n"])
def test_other_pages_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of the parser, or ours
        read_snapshot(text, 0.0)


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=50), st.floats(0.001, 1.0))
def test_quantiles_lie_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    bounds = (0.5, 1.0, 2.0, 5.0, 10.0, math.inf)
    histogram = Histogram(bounds, tuple(sum(value <= bound for value in values) for bound in bounds))
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    place = next(i for i, bound in enumerate(bounds) if true <= bound)
    found = histogram.quantile(share)
    assert found is not None
    if bounds[place] == math.inf:
        assert found == 10.0
    else:
        assert (bounds[place - 1] if place else 0.0) <= found <= bounds[place]


def test_empty_histograms_have_no_quantiles() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram((1.0, math.inf), (0.0, 0.0)).quantile(0.99) is None


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0]) == "  "
    assert sparkline([0.0, 1.0, 4.0, 8.0]) == " ▁▄█"


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (2.345, "2.35 s")])
def test_times(value: float | None, text: str) -> None:
    assert top_screen.seconds(value) == text


def test_once(invoke, server: Canned) -> None:
    server.answers["/metrics"] = (200, metrics().page())
    result = invoke("top", server.url, "--once", "--interval", "0.1")
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    for part in ("running 3", "waiting 2", "25%", "75% of 200 tokens", "lookup", "50%", "first token", "ok"):
        assert part in text
    assert "memory" not in text  # has done nothing


def test_json(invoke, server: Canned) -> None:
    server.answers["/metrics"] = (200, metrics().page())
    server.answers["/health"] = (503, b'{"status":"draining"}')
    address = server.url.removeprefix("http://") + "/"
    document = json.loads(invoke("top", address, "--json", "--interval", "0.1", "--api-key", "secret").stdout)
    assert document["url"] == server.url
    assert document["health"] == "draining"
    assert document["tokens_per_second"] == 0.0
    assert document["acceptance"] == {"lookup": 0.5}
    assert document["cache_hit_rate"] == 0.75
    assert set(document["latencies"]["first_token"]) == {"p50", "p90", "p99"}
    assert set(server.keys) == {"Bearer secret"}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((401, b"{}"), "give --api-key"),
        ((404, b"{}"), "status 404"),
        ((200, b"<html>hello</html>"), "no figures of obole"),
        ((200, b"\xff\xfe"), "no figures of obole"),
    ],
)
def test_servers_without_figures(invoke, server: Canned, answer: tuple[int, bytes], told: str) -> None:
    server.answers["/metrics"] = answer
    result = invoke("top", server.url, "--once")
    assert result.exit_code == 1
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_server(invoke) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = invoke("top", address, "--once")
        assert (result.exit_code, result.stdout) == (1, "")
        assert (
            result.stderr
            == f"error: There is no server at http://{address} (Connection refused): start one with obole serve.\n"
        )
        failure = json.loads(invoke("top", address, "--json").stdout)
        assert "There is no server" in failure["error"]["message"]


def test_a_server_of_something_else(invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        result = invoke("top", f"127.0.0.1:{listening.getsockname()[1]}", "--once")
        thread.join()
    assert result.exit_code == 1
    assert "is another program listening there?" in result.stderr


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://[::1", "host:port", "http://host/?a=b", "", "a b"])
def test_bad_addresses(invoke, url: str) -> None:
    result = invoke("top", url, "--once")
    assert result.exit_code == 2
    assert "is not the address of a server" in result.stderr


def test_drawing_needs_a_terminal(invoke, server: Canned) -> None:
    result = invoke("top", server.url)
    assert result.exit_code == 2
    assert "--once" in result.stderr


MAIN = "import sys; from obole.cli.app import main; sys.argv[0] = 'obole'; main()"


@pytest.fixture
def watching(server: Canned) -> Iterator[Callable[[str], str]]:
    """`obole top` on a terminal; call it to read on until some text has been drawn."""
    server.answers["/metrics"] = (200, metrics().page())
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-c", MAIN, "top", server.url, "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    drawn = b""

    def read_until(text: str) -> str:
        nonlocal drawn
        while text.encode() not in drawn:
            drawn += os.read(ours, 65536)
        before, _, drawn = drawn.partition(text.encode())
        return before.decode("utf-8", "replace")

    yield read_until
    process.send_signal(signal.SIGINT)
    read_until("\x1b[?1049l")  # the screen is as it was before
    assert process.wait(20) == 0
    assert b"Traceback" not in drawn
    os.close(ours)


def test_watching_goes_on_until_ctrl_c(watching: Callable[[str], str], server: Canned) -> None:
    watching("running")
    del server.answers["/metrics"]
    watching("status 404")
    server.answers["/metrics"] = (200, metrics().page())
    watching("first token")
