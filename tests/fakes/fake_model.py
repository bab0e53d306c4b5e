"""A model without weights, for tests of everything around a model.

Its next token is a pure function of all tokens so far and the seed, so any token that is lost, repeated or taken from
another sequence changes the rest of the answer. Its KV cache records, in every slot of every block, which token of which
context was written there. Each row checks every slot that it may read, so a block that is wrong, stale, evicted too early or
shared by mistake is found when it is read, not when it happens to matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from obole.cache.spec import CacheGroup
from obole.cache.tiers.interface import Bytes
from obole.config import BLOCK_SIZE
from obole.types import FinishReason, Sequence, StepPlan, StepResult, TokenLogprob

WEIGHT_BYTES = 1_000_003  # prime: shares by rows never come out even


def context_digest(tokens: list[int] | tuple[int, ...]) -> bytes:
    return extend_digests([], tokens)[-1]


def extend_digests(known: list[bytes], tokens: list[int] | tuple[int, ...]) -> list[bytes]:
    """Digest of all tokens up to each one."""
    for token in tokens[len(known) :]:
        known.append(blake2b((known[-1] if known else b"") + token.to_bytes(4, "little"), digest_size=16).digest())
    return known


def next_token(tokens: list[int] | tuple[int, ...], seed: int, vocab: int) -> int:
    return (
        int.from_bytes(blake2b(context_digest(tokens) + seed.to_bytes(8, "little"), digest_size=8).digest(), "little") % vocab
    )


def score(tokens: list[int] | tuple[int, ...], position: int) -> TokenLogprob:
    """What stands for the log-probability of the token at `position`, given those before it."""
    return TokenLogprob(tokens[position], -next_token(tokens[: position + 1], 0, 10_007) / 1000)


class Slot(NamedTuple):
    group: int
    position: int
    context: bytes  # digest of all tokens up to and including this one
    tenant: str


@dataclass
class FakeModel:
    """Runs step plans. Raises AssertionError as soon as a plan would read or write what it must not."""

    groups: tuple[CacheGroup, ...]
    num_blocks: int
    max_rows: int
    vocab: int = 50
    rows_computed: int = 0
    slots: list[list[Slot | None]] = field(init=False)
    digests: dict[Sequence, list[bytes]] = field(default_factory=dict)
    contents: list[list[Slot | None]] = field(default_factory=list)  # of blocks that were gathered

    def __post_init__(self) -> None:
        self.slots = [[None] * BLOCK_SIZE for _ in range(self.num_blocks)]

    def gather(self, blocks: list[int]) -> Bytes:
        """What stands for the bytes of blocks, (n, 8)."""
        first = len(self.contents)
        self.contents += [list(self.slots[block]) for block in blocks]
        return np.arange(first, len(self.contents), dtype="<u8").view(np.uint8).reshape(len(blocks), 8)

    def lay(self, plan: StepPlan) -> None:
        """Lay what was gathered into blocks again."""
        blocks = [block for block, _ in plan.promotions]
        assert len(set(blocks)) == len(blocks), "two promotions into one block"
        for block, data in plan.promotions:
            self.slots[block] = list(self.contents[int(data.view("<u8")[0])])

    def run(self, plan: StepPlan) -> StepResult:
        self.check_plan(plan)
        self.lay(plan)
        for source, target in plan.copies:
            self.slots[target] = list(self.slots[source])
        # all rows of a layer are written before any is read, as attention kernels do
        for seq, start, rows in zip(plan.sequences, plan.starts, plan.rows, strict=True):
            contexts = self.contexts(seq)
            for position in range(start, start + rows):
                self.write(seq, position, contexts)
        for seq, start, rows in zip(plan.sequences, plan.starts, plan.rows, strict=True):
            contexts = self.contexts(seq)
            for position in range(start, start + rows):
                self.read(seq, position, contexts)
        self.rows_computed += plan.total_rows
        result = StepResult(
            [], [], [], WEIGHT_BYTES, [1000 * rows + start for start, rows in zip(plan.starts, plan.rows, strict=True)]
        )
        for i, seq in enumerate(plan.sequences):
            params = seq.request.params
            new = self.verified(seq) if plan.samples[i] else []
            result.tokens.append(new)
            wants = params.logprobs is not None and bool(new)
            entries = [score([*seq.tokens, *new], len(seq.tokens) + j) for j in range(len(new))]
            result.logprobs.append(entries if wants else None)
            result.prompt_logprobs.append(self.prompt_scores(seq, plan.starts[i], plan.rows[i]))
        return result

    def verified(self, seq: Sequence) -> list[int]:
        """What the model says after the newest token, and after each drafted one that it said itself."""
        new: list[int] = []
        for drafted in [*draft_of(seq), None]:
            new.append(next_token([*seq.tokens, *new], seq.seed, self.vocab))
            if new[-1] != drafted:
                break
        return new

    def prompt_scores(self, seq: Sequence, start: int, rows: int) -> list[TokenLogprob] | None:
        if seq.request.params.prompt_logprobs is None:
            return None
        known = len(seq.prompt_logprobs)
        end = min(start + rows, seq.prompt_len - 1)
        assert start <= known or known == seq.prompt_len - 1, "prompt tokens were skipped that should have been scored"
        return [score(seq.tokens, position + 1) for position in range(max(start, known), end)]

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.sequences
        assert len(plan.sequences) == len(plan.starts) == len(plan.rows) == len(plan.samples) == len(set(plan.sequences))
        assert plan.total_rows == sum(plan.rows) <= self.max_rows
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        writers: dict[int, Sequence] = {}
        for seq, start, rows, samples in zip(plan.sequences, plan.starts, plan.rows, plan.samples, strict=True):
            assert rows > 0
            assert start == seq.num_computed
            assert start + rows <= len(seq.tokens) + len(draft_of(seq))
            assert samples == (start + rows >= len(seq.tokens) < seq.max_len)
            if draft_of(seq):
                assert start + rows == len(seq.tokens) + len(draft_of(seq)) < seq.max_len
            for table in seq.tables:
                for block in table[start // BLOCK_SIZE : (start + rows - 1) // BLOCK_SIZE + 1]:
                    assert block >= 0, "a row has no block to be written to"
                    assert writers.setdefault(block, seq) is seq, "two sequences write one block"
        for seq, start in zip(plan.sequences, plan.starts, strict=True):
            for table, group in zip(seq.tables, self.groups, strict=True):
                first = 0 if group.window is None else max(0, start - group.window + 1) // BLOCK_SIZE
                for block in table[first : start // BLOCK_SIZE]:
                    assert block not in writers, "a sequence reads a block that another one writes"

    def write(self, seq: Sequence, position: int, contexts: list[bytes]) -> None:
        context = contexts[position]
        for g, table in enumerate(seq.tables):
            self.slots[table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = Slot(g, position, context, seq.request.tenant)

    def contexts(self, seq: Sequence) -> list[bytes]:
        known = extend_digests(self.digests.setdefault(seq, []), seq.tokens)
        return extend_digests(list(known), [*seq.tokens, *draft_of(seq)]) if seq.draft else known

    def read(self, seq: Sequence, position: int, contexts: list[bytes]) -> None:
        for g, (group, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for p in range(first, position + 1):
                block = table[p // BLOCK_SIZE]
                assert block >= 0, f"position {position} needs the block of position {p}, which is gone"
                wanted = (g, p, contexts[p], seq.request.tenant)
                assert self.slots[block][p % BLOCK_SIZE] == wanted, f"position {position} reads a wrong slot for position {p}"


def draft_of(seq: Sequence) -> list[int]:
    return [] if seq.draft is None else seq.draft.tokens


def solo(seq: Sequence, vocab: int) -> tuple[list[int], FinishReason]:
    """What the answer must be: the output of `seq`'s request alone, from the rules and nothing else."""
    tokens = list(seq.request.prompt_ids)
    params = seq.request.params
    if seq.max_len == len(tokens):
        return [], FinishReason.LENGTH
    while True:
        tokens.append(next_token(tokens, seq.seed, vocab))
        output = len(tokens) - seq.prompt_len
        if tokens[-1] in seq.stop_ids and output >= params.min_tokens:
            return tokens[seq.prompt_len :], FinishReason.STOP
        if len(tokens) >= seq.max_len:
            return tokens[seq.prompt_len :], FinishReason.LENGTH
