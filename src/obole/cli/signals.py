"""What Ctrl-C does while there is nothing to end in an orderly way: while modules are imported, and at the very end.

A `KeyboardInterrupt` in the middle of an import comes out as a stack of others, or as an `ImportError` of the module that was
interrupted. Where SIGINT is ignored (a process started in the background) it stays so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit status: 128 + SIGINT, as shells have it
Handler = Callable[[int, FrameType | None], object]


def handle(handler: Handler) -> None:
    """Have SIGINT handled by `handler`, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def leave(_signal: int, _frame: FrameType | None) -> None:
    """Ends the process without a word."""
    os._exit(INTERRUPTED)


@contextmanager
def later() -> Iterator[None]:
    """Within, Ctrl-C is only noted; at the end it raises `KeyboardInterrupt`."""
    pressed = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    previous = signal.getsignal(signal.SIGINT)
    handle(note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
