# The C++ module (csrc/module.cpp): plain addresses, no checks.

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

class Packed:
    def __init__(self, inputs: int) -> None: ...
    def add(self, kind: str, outputs: int, bias: int) -> None: ...
    def fill(self, ops: Ops, rows: int, row_bytes: int, first: int, count: int) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class KvPool:
    """Where a layer's keys and values lie. `format`: float32, bfloat16, int8 or fp8; scales 0 for the first two."""

    def __init__(self, format: str, k: int, v: int, scale_k: int, scale_v: int, /) -> None: ...

class Tape:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def run(self) -> None: ...
    def run_timed(self) -> dict[str, int]: ...

class Ops:
    def __init__(self, isa: str, threads: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def linear(self, w: Packed, x: int, x_row: int, rows: int, out: int, /) -> None: ...
    def adapt(
        self, down: Packed, up: Packed, x: int, x_row: int, ids: int, id: int, rows: int, out: int, out_row: int, /
    ) -> None: ...
    def embed(self, w: Packed, ids: int, n: int, scale: float, out: int, /) -> None: ...
    def rms_norm(
        self, x: int, rows: int, x_row: int, heads: int, x_head: int, n: int, weight: int, eps: float, out: int, /
    ) -> None: ...
    def add_rms_norm(
        self, x: int, x_row: int, residual: int, residual_row: int, rows: int, n: int, weight: int, eps: float, out: int, /
    ) -> None: ...
    def add(self, residual: int, residual_row: int, x: int, x_row: int, rows: int, n: int, /) -> None: ...
    def rope(
        self, x: int, rows: int, x_row: int, heads: int, x_head: int, half: int, positions: int, cos: int, sin: int, /
    ) -> None: ...
    def kv_write(
        self, k: int, k_row: int, k_head: int, v: int, v_row: int, v_head: int, rows: int, kv_heads: int, head_dim: int,
        pool: KvPool, slots: int, /,
    ) -> None: ...  # fmt: skip
    def attention(
        self, q: int, q_row: int, q_head: int, pool: KvPool, table: int, table_row: int, row_starts: int, pos_starts: int,
        sequences: int, rows: int, heads: int, kv_heads: int, head_dim: int, scale: float, window: int, softcap: float,
        out: int, /,
    ) -> None: ...  # fmt: skip
    def gated(self, silu: bool, x: int, x_row: int, rows: int, n: int, out: int, /) -> None: ...
    def argmax(self, x: int, x_row: int, rows: int, n: int, out: int, /) -> None: ...
    def confidence(self, x: int, x_row: int, best: int, rows: int, n: int, out: int, /) -> None: ...
    def gumbel(self, seed: int, position: int, ids: int, n: int, out: int, /) -> None: ...
    def record(self, tape: Tape | None) -> None: ...

class Probe:
    """What this machine can do at most (csrc/probe.h)."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def read(self, data: int, nbytes: int, /) -> int:
        """Read memory once, aligned to 64 and a multiple of it; the exclusive or of its 64-bit words."""
    def multiply(self, kind: str, isa: str, rounds: int, /) -> int:
        """Products made ("int8", "fp32" or "bf16"); 0 where this machine has no such instruction."""

class SuffixMatch:
    """A suffix that occurs in an index, and what followed it there."""

    @property
    def length(self) -> int:
        """Tokens of the suffix, at least 1."""
    @property
    def tokens(self) -> list[int]:
        """At most `most` tokens that followed the latest occurrence of the best branch, the branch's own included. They stop at
        the end of their document; at the end of the one being written they go on periodically."""
    @property
    def support(self) -> int:
        """Occurrences of the best branch, at least 1."""
    @property
    def total(self) -> int:
        """Occurrences of all branches, at least `support`."""
    @property
    def branches(self) -> list[tuple[int, int]]:
        """(next token, occurrences) of up to 8 branches, those with more occurrences first, of equals the latest."""

class SuffixIndex:
    """The substrings of one or several documents of token ids (csrc/suffix.h)."""

    def __init__(self, counted: int = 16, limit: int = 2147483647) -> None:
        """`counted`: classes of strings whose occurrences are counted at each token. `limit`: of states, and of tokens."""
    def __len__(self) -> int:
        """Tokens appended in all."""
    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
    def begin(self) -> None:
        """What is appended next is a new document: no match runs across."""
    def append(self, token: int, /) -> None:
        """Raises `ValueError` for a token that is negative or over 31 bits, or when the index is full."""
    def extend(self, tokens: Sequence[int] | npt.NDArray[np.int32], /) -> None:
        """Append many. None of them if one is no token; those before the limit if the index gets full."""
    def resume(self, tokens: Sequence[int] | npt.NDArray[np.int32], /) -> int:
        """Make `tokens` the current document: the beginning that it has in common with a document here is shared (and counted
        once), the rest is appended. Returns how many tokens are shared."""
    def match(self, most: int, /) -> SuffixMatch | None:
        """The longest suffix of the current document that something follows somewhere in the index, or None."""
    def step(self, token: int, most: int, /) -> SuffixMatch | None:
        """`append` and `match` in one call."""
    def copy(self) -> SuffixIndex: ...

class SuffixCursor:
    """Reads an index along the tokens of another text."""

    def __init__(self, index: SuffixIndex, /) -> None: ...
    def advance(self, tokens: Sequence[int] | npt.NDArray[np.int32], /) -> None:
        """Read on. Amortised O(1) a token. Raises `ValueError` like `SuffixIndex.extend`."""
    def match(self, most: int, /) -> SuffixMatch | None:
        """The longest suffix of what was read that occurs in the index and that something follows there, or None. What was put
        into the index only after it was read by the cursor can extend a match from then on, not backwards."""
    def step(self, token: int, most: int, /) -> SuffixMatch | None:
        """`advance` by one token, and `match`."""

def file_bytes(kind: str, inputs: int) -> int: ...
def runs(isa: str) -> bool: ...
def amx_refusal() -> str | None:
    """Why AMX cannot be used here, or None where it can."""

def same_products(a: str, b: str) -> bool:
    """Whether two instruction sets compute the same bits in small products of every quantised kind."""
