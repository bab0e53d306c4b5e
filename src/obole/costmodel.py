"""What a step reads from memory: pure functions of rows and context. No torch, no state."""

from __future__ import annotations


def visible_tokens(start: int, rows: int, window: int | None) -> int:
    """Cached tokens that rows at positions [start, start + rows) see between them, their own included.

    The attention kernel reads keys and values once for all rows of a sequence, so this is what comes from memory.
    """
    end = start + rows
    return end if window is None else end - max(0, start - window + 1)


def kv_bytes_read(start: int, rows: int, layers: tuple[tuple[int | None, int], ...]) -> int:
    """Bytes of keys and values read for [start, start + rows); `layers`: (window, bytes per token) of each kind summed."""
    return sum(visible_tokens(start, rows, window) * bytes_per_token for window, bytes_per_token in layers)


def weight_bytes_read(rows: int, heads: int, layer_bytes: int, head_bytes: int, embedding_row_bytes: int) -> int:
    """Bytes of weights that one pass over `rows` rows reads: those of each product once, the head's `heads` times.

    A product of more rows than fit the cache reads its weights again for every few dozen rows; that is not counted.
    """
    return layer_bytes + rows * embedding_row_bytes + heads * head_bytes
