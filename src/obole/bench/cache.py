"""What a cached prompt costs from each tier, and what writing behind costs those who are computing.

The pool is emptied in the way in which pressure empties it: by having all its blocks given up. Before each reading from SSD,
the system's own cache of the files is dropped, and so it is before the plain reading that is compared with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from obole.bench import inside
from obole.bench.drive import check_length, check_repeat, prompts
from obole.bench.samples import Report, Samples
from obole.engine.engine import Engine
from obole.engine.results import Result
from obole.errors import InvalidRequest
from obole.types import SamplingParams, Tier

READ_BYTES = 4 << 20  # at a time, in plain reading
SEQUENCES = 4  # at once, while the cost of writing behind is measured
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128  # of each

OpenEngine = Callable[[dict[str, object]], AbstractContextManager[Engine]]


@dataclass(frozen=True, slots=True)
class CacheRow:
    """`seconds` to the first token of a prompt that was in a tier, with `cached_tokens` of it; `share`: of those when cold."""

    tier: str
    cached_tokens: int
    seconds: Samples
    share: float
    identical: bool


@dataclass(frozen=True, slots=True)
class PlainRead:
    """Reading as many bytes as the prompt's blocks have, from the same files, one after the other."""

    bytes: int
    seconds: Samples


@dataclass(frozen=True, slots=True)
class WriteBehind:
    """Tokens a second, of prompts and answers, with tiers and without, in turn."""

    without: Samples
    with_tiers: Samples

    @property
    def cost(self) -> float:
        """Share of the throughput, median against median."""
        return 1 - self.with_tiers.median / self.without.median


@dataclass(frozen=True, slots=True)
class CacheFigures:
    rows: tuple[CacheRow, ...]
    plain: PlainRead
    write_behind: WriteBehind


def cache(open_engine: OpenEngine, folder: Path, size: int, tokens: int, repeat: int, report: Report) -> CacheFigures:
    """`open_engine`: with these settings beside those of the user. `folder`, `size`: for the SSD. Raises `InvalidRequest`."""
    check_repeat(repeat)
    stages = 3 * repeat + 4
    with open_engine({"kv_ram": size}) as engine:
        check_length(engine, "tokens", tokens, 1)
        if tokens + 1 > engine.info.kv_tokens:
            raise InvalidRequest(
                "tokens", f"The KV pool holds {engine.info.kv_tokens} tokens: ask for fewer, or raise kv_device."
            )
        [prompt] = prompts(engine, 1, tokens, seed=7)
        report("cold", 0, stages)
        cold = _answer(engine, prompt)
        device = [_answer(engine, prompt) for _ in range(repeat)]
        ram = []
        for i in range(repeat):
            report("RAM", 1 + i, stages)
            inside.empty_pool(engine)
            ram.append(_answer(engine, prompt))
    with open_engine({"kv_ssd": f"{folder}:{size}"}) as engine:
        report("cold", 1 + repeat, stages)
        colds = [cold, _answer(engine, prompt)]
        inside.write_all(engine)
        ssd = []
        for i in range(repeat):
            report("SSD", 2 + repeat + i, stages)
            inside.empty_pool(engine)
            drop_files(folder)
            ssd.append(_answer(engine, prompt))
        blocks = -(-tokens // 16) * inside.groups(engine)
        report("plain reading", 2 + 2 * repeat, stages)
        plain = plain_read(folder, blocks * inside.block_bytes(engine), repeat)
        write_behind = throughput(engine, repeat, lambda i: report("writing behind", 3 + 2 * repeat + i, stages))
    base = Samples.of(_seconds(r) for r in colds)
    rows = [CacheRow("cold", 0, base, 1.0, all(_same(r, cold) for r in colds))]
    for tier, results in ((Tier.DEVICE, device), (Tier.RAM, ram), (Tier.SSD, ssd)):
        seconds = Samples.of(_seconds(r) for r in results)
        cached = min(r.receipt.cached_by_tier[tier] for r in results)
        rows.append(CacheRow(str(tier), cached, seconds, seconds.median / base.median, all(_same(r, cold) for r in results)))
    return CacheFigures(tuple(rows), plain, write_behind)


def throughput(engine: Engine, repeat: int, report: Callable[[int], None]) -> WriteBehind:
    """The same work with tiers and without, in turn; every prompt is new to them."""
    found: dict[bool, list[float]] = {True: [], False: []}
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, speculate="off")
    for i in range(repeat):
        report(i)
        for tiered in (True, False) if i % 2 else (False, True):
            asked = prompts(engine, SEQUENCES, PROMPT_TOKENS, seed=100 + 2 * i + tiered)
            with inside.with_tiers(engine, tiered):
                began = time.perf_counter()
                engine.generate(list(asked), params, tenant=inside.new_tenant())
                found[tiered].append(SEQUENCES * (PROMPT_TOKENS + OUTPUT_TOKENS) / (time.perf_counter() - began))
    return WriteBehind(Samples.of(found[False]), Samples.of(found[True]))


def plain_read(folder: Path, size: int, repeat: int) -> PlainRead:
    """So many bytes of the largest files in a folder, one after the other."""
    files = sorted(_files(folder), key=lambda path: path.stat().st_size, reverse=True)
    seconds = []
    for _ in range(repeat):
        drop_files(folder)
        began = time.perf_counter()
        left = size
        for path in files:
            with path.open("rb", buffering=0) as file:
                while left > 0 and (data := file.read(min(READ_BYTES, left))):
                    left -= len(data)
        seconds.append(time.perf_counter() - began)
        if left:
            raise RuntimeError(f"There are {left} bytes fewer in {folder} than were written.")
    return PlainRead(size, Samples.of(seconds))


def drop_files(folder: Path) -> None:
    """Have the system forget what it holds in memory of the files."""
    for path in _files(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _files(folder: Path) -> Sequence[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _answer(engine: Engine, prompt: list[int]) -> Result:
    [result] = engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True, speculate="off", logprobs=3))
    return result


def _seconds(result: Result) -> float:
    return result.receipt.total_seconds


def _same(result: Result, cold: Result) -> bool:
    return result.choices[0].logprobs == cold.choices[0].logprobs
