"""The process for chat templates: no request ever gets the reply to another."""

from __future__ import annotations

import linecache
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from obole.errors import ModelError
from obole.text import line_process, template_process
from obole.text.template_process import TemplateProcess

UNDER_TEST = {line_process.__file__, template_process.__file__}
SLOW = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{{ text }}"


def render(process: TemplateProcess, text: str) -> str:
    return process.render("{{ text }}", {"text": text})


class Interrupt:
    """A tracer that raises KeyboardInterrupt at the nth line that runs in the modules under test; counts them from 0."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in UNDER_TEST or frame.f_code.co_name in ("_end", "_stop", "<genexpr>"):
            return None
        # a tracer is called at both ends of `with` and at `try:`, where the interpreter takes no signals
        line = linecache.getline(file, frame.f_lineno).strip()
        if event == "line" and not line.startswith(("with ", "try:")):
            self.seen += 1
            if self.seen > self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(process: TemplateProcess, at: int) -> bool:
    """Whether a render was cut short at line `at`; False when it has fewer lines."""
    before = sys.gettrace()
    sys.settrace(Interrupt(at))
    try:
        return not render(process, "SECRET of request one")
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)


def test_an_interrupt_at_any_line_leaves_no_reply_behind() -> None:
    process = TemplateProcess()
    cut = 0
    for fresh in (True, False):
        at = 0
        while True:
            if fresh:
                process.close()
            else:
                render(process, "warm")
            if not interrupted(process, at):
                break
            assert render(process, f"mine {at}") == f"mine {at}"
            assert render(process, "and the next") == "and the next"
            cut, at = cut + 1, at + (4 if fresh else 1)
    process.close()
    assert cut > 30


def test_an_interrupt_while_the_template_renders_ends_the_process() -> None:
    process = TemplateProcess()
    assert render(process, "warm") == "warm"
    running = process._process
    timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.render(SLOW, {"text": "SECRET of request one"})
    timer.join()
    assert running is not None
    assert running.poll() is not None
    assert render(process, "mine") == "mine"
    process.close()


def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def refuse(process: subprocess.Popen[bytes], *_: object) -> bytes | None:
        started.append(process)
        raise KeyboardInterrupt

    process = TemplateProcess()
    with monkeypatch.context() as patch:
        patch.setattr(line_process, "_ask", refuse)
        with pytest.raises(KeyboardInterrupt):
            render(process, "SECRET")
    assert [p.poll() is not None for p in started] == [True]
    assert render(process, "mine") == "mine"
    process.close()


def test_a_reply_to_another_request_is_refused() -> None:
    process = TemplateProcess()
    assert render(process, "warm") == "warm"
    running = process._process
    assert running is not None
    assert running.stdin is not None
    running.stdin.write(b'{"number": 1, "template": "SECRET", "context": {}, "seconds": 5, "characters": 99}\n')
    running.stdin.flush()
    time.sleep(0.05)
    with pytest.raises(ModelError, match="another request"):
        render(process, "mine")
    assert running.poll() is not None
    assert render(process, "mine") == "mine"
    process.close()
