"""Tries grammars in a process of its own: `python -m obole.text.grammar_worker`.

A grammar comes from whoever sends a request, and there are small ones that exhaust the stack of the library that compiles
them, or its time, or the memory; the limits of a process bound what the library's own do not. One JSON object per line:
{"vocab_size", "names"} first, then {"number", "seconds", "grammar"} -> {"number", "bytes", "seconds"} for a grammar that
compiles and can be followed, with what it takes, or {"number", "error"}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from obole.text.grammar_vocabulary import byte_vocabulary, parser_limits

STACK = 1 << 20  # bytes; the engine's threads have several times that
MEMORY = 192 << 20  # bytes of address space beyond what an idle process takes
WALKS, STEPS = 4, 64  # from the start of a grammar: what costs too much to follow is mostly found within a few steps
CLOSING = b'"]},'  # preferred on these walks, which would not leave the first string otherwise


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten sizes, of which two matter here."""

    _fields_ = (
        ("_before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("_between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("_after", ctypes.c_size_t * 2),
    )


def memory_meter() -> Callable[[], int]:
    """Reads how many bytes are allocated; always 0 where the C library cannot tell."""
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return lambda: 0
    read.restype = _Mallinfo2

    def allocated() -> int:
        info = read()
        return int(info.uordblks + info.hblkhd)

    return allocated


def try_grammar(vocabulary: LLTokenizer, vocab_size: int, grammar: str, allocated: Callable[[], int]) -> dict[str, Any]:
    before, began = allocated(), time.process_time()
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    seconds = time.process_time() - began
    if not matcher.is_error():
        matcher.compute_bitmask()
    error = str(matcher.get_error())
    for seed in range(WALKS):
        error = error or walk(matcher.deep_copy(), vocab_size, Random(seed))
    return {"error": error} if error else {"bytes": max(0, allocated() - before), "seconds": seconds}


def walk(matcher: LLMatcher, base: int, random: Random) -> str:
    """Follow a grammar byte by byte, at random; what went wrong, if anything."""
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        allowed = _byte_set(mask, base)
        if not allowed:  # the end, or a control token
            break
        matcher.consume_token(base + _pick(allowed, random))
        if matcher.is_stopped():
            break
    return str(matcher.get_error())


def _byte_set(mask: bytes, base: int) -> int:
    """The 256 bits from number `base` on."""
    bits = int.from_bytes(mask[base >> 3 : (base >> 3) + 33], "little") >> (base & 7)
    return bits & ((1 << 256) - 1)


def _pick(allowed: int, random: Random) -> int:
    if allowed & (allowed - 1) == 0:
        return allowed.bit_length() - 1
    closing = [byte for byte in CLOSING if allowed >> byte & 1]
    if closing and random.random() < 0.5:
        return random.choice(closing)
    return random.choice([byte for byte in range(256) if allowed >> byte & 1])


def confine(pages: int) -> None:
    """Give up what compiling does not need. `pages`: the size of this process now."""
    for limit, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),  # no new descriptors: no files, sockets, pipes; those that are open stay
    ):
        with contextlib.suppress(OSError, ValueError):  # a lower limit is in force already
            resource.setrlimit(limit, (value, value))


def serve() -> None:
    hello = json.loads(sys.stdin.buffer.readline())
    vocab_size = hello["vocab_size"]
    vocabulary = byte_vocabulary({int(i): name for i, name in hello["names"].items()}, vocab_size)
    allocated = memory_meter()
    try_grammar(vocabulary, vocab_size, 'start: %json {"type": "object"}', allocated)  # loads what is loaded late
    with contextlib.suppress(OSError):  # no such file outside Linux: no limit on memory there
        confine(int(Path("/proc/self/statm").read_text().split()[0]))
    sys.stdout.write("{}\n")  # ready
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        reply = try_grammar(vocabulary, vocab_size, request["grammar"], allocated)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if "error" in reply:
            reply["error"] = reply["error"][:1000]
        sys.stdout.write(json.dumps(reply | {"number": request["number"]}) + "\n")
        sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # an overrun ends the process, even inside one long C call
    threading.stack_size(STACK)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
