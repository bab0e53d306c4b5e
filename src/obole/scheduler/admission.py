"""What is refused at the door: requests that could never be served, however long they waited. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from obole.cache.managers import KVCacheManager
from obole.errors import InvalidRequest
from obole.scheduler.rules import most_rows
from obole.types import Sequence


class Stuck(NamedTuple):
    """The head of the queue did not fit: it is not tried again, at the cost of a look-up per block, before this changes."""

    seq: Sequence
    available: int  # blocks
    running: int  # sequences

    def lasts(self, head: Sequence, available: int, running: int) -> bool:
        """Whether nothing has changed for the better."""
        return head is self.seq and 0 < running >= self.running and available <= self.available


def longest_computable(cache: KVCacheManager, max_context: int) -> int:
    """Most tokens, at most `max_context`, whose state an empty pool can hold for one sequence."""
    low, high = 0, max_context
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache.can_ever_hold(middle) else (low, middle - 1)
    return low


def refuse_impossible(seq: Sequence, cache: KVCacheManager, max_context: int, longest_answer: int, max_rows: int) -> None:
    """Raise `InvalidRequest` if the sequence can never be computed. `longest_answer`: prompt and output that fit together;
    `max_rows`: of a step.

    The newest token of an answer is never computed, so it needs a place in the context, but none in the pool.
    """
    prompt, asked = seq.prompt_len, seq.request.params.max_tokens
    blocks = cache.ledger.num_blocks
    if prompt == 0:
        raise InvalidRequest("prompt", "The prompt has no tokens; send at least one.")
    scoring = asked == 0
    wanted = prompt if scoring else prompt + 1
    if wanted > max_context:
        raise InvalidRequest(
            "prompt",
            f"The prompt has {prompt} tokens, and the context of {max_context} must hold it"
            f"{'' if scoring else ' and at least one token of answer'}; shorten the prompt or raise max_context.",
        )
    if not cache.can_ever_hold(prompt):
        raise InvalidRequest(
            "prompt",
            f"The prompt of {prompt} tokens needs {cache.blocks_needed(prompt)} blocks of KV cache, and the whole pool has "
            f"{blocks}; shorten the prompt or raise kv_device.",
        )
    if most_rows(seq) > max_rows:
        raise InvalidRequest(
            "mtp_tokens",
            f"mtp_tokens of {seq.stride} needs steps of {most_rows(seq)} rows, and max_batch_tokens is {max_rows}; ask for at "
            f"most {(max_rows + 1) // 2} or raise max_batch_tokens.",
        )
    least = seq.request.params.min_tokens
    if prompt + least > longest_answer and not scoring:
        raise InvalidRequest(
            "min_tokens",
            f"{prompt} prompt tokens and min_tokens of {least} are more than the {longest_answer} tokens that fit; ask for "
            f"at most {longest_answer - prompt}.",
        )
    total = max(seq.max_len, prompt + (asked or 0))
    if total > max_context:
        raise InvalidRequest(
            "max_tokens",
            f"{prompt} prompt tokens and max_tokens of {total - prompt} are more than the context of {max_context}; ask for "
            f"at most {max_context - prompt}.",
        )
    if not scoring and total > longest_answer:
        raise InvalidRequest(
            "max_tokens",
            f"{prompt} prompt tokens and max_tokens of {total - prompt} need {cache.blocks_needed(total - 1)} blocks of KV "
            f"cache, and the whole pool has {blocks}; ask for at most {longest_answer - prompt} or raise kv_device.",
        )
