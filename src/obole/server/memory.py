"""Memory that nobody uses goes back to the system while there is nothing to do."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

REST_SECONDS = 2.0  # without anything to compute


class Rest:
    """Tells when memory should be given back: once in each pause of the engine, when that has lasted a while.

    The buffers of long prompts are tens of MiB that come and go. Small things that stay keep an allocator from joining what is
    free between them, so that its share grows for hours, by more than a hundred MiB, though no more is in use.
    `busy`: whether something is computed or waits for that. `clock`: seconds.
    """

    def __init__(self, busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._busy = busy
        self._clock = clock
        self._since: float | None = None  # when the pause was first seen
        self._due = True

    def look(self) -> bool:
        """Whether it is time. To be asked again and again."""
        if self._busy():
            self._since, self._due = None, True
        elif self._since is None:
            self._since = self._clock()
        elif self._due and self._clock() - self._since >= REST_SECONDS:
            self._due = False
            return True
        return False


def give_back() -> None:
    """Give the free pages of the allocator back, where it can: glibc's `malloc_trim`. Takes milliseconds, without the GIL."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
