"""Reading blocks from the SSD tier against reading the same files from end to end: `python benchmarks/tier_reads.py FOLDER`.

Writes 1,024 blocks of 196,608 bytes (a prompt of 16k tokens of Qwen2.5-Coder-0.5B), then times, in turns and with the page
cache emptied before each (POSIX_FADV_DONTNEED), plain reads of 4 MiB into one buffer, and `TierStore.load`, checksums and
memory for all blocks included. Prints both, and the ratio of their medians. Wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from obole.cache.tiers.interface import BlockName
from obole.cache.tiers.store import TierStore

IDENTITY, OWNER = bytes(32), bytes(16)


def empty_page_cache(folder: Path) -> None:
    for path in folder.glob("*.seg"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain(folder: Path) -> float:
    buffer = bytearray(4 << 20)
    begun = time.perf_counter()
    for path in folder.glob("*.seg"):
        fd, offset = os.open(path, os.O_RDONLY), 0
        while count := os.preadv(fd, [buffer], offset):
            offset += count
        os.close(fd)
    return time.perf_counter() - begun


def load(store: TierStore, keys: list[bytes]) -> float:
    begun = time.perf_counter()
    blocks = store.load(keys)
    while not blocks.over:
        store.wait(1.0)
    seconds = time.perf_counter() - begun
    assert blocks.ready == len(keys)
    blocks.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--block-bytes", type=int, default=196_608)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    size, count = options.block_bytes, options.blocks
    keys = [number.to_bytes(32) for number in range(count)]
    chance = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        with_files = (folder, 8 * size * count)
        store = TierStore(size, IDENTITY, 0, with_files, queue_bytes=size * count)
        for start in range(0, count, 32):
            blocks = chance.integers(0, 256, (len(keys[start : start + 32]), size), dtype=np.uint8)
            store.persist([BlockName(key, OWNER) for key in keys[start : start + 32]], blocks)
        store.flush()
        store.close()
        times: dict[str, list[float]] = {"plain": [], "load": []}
        for _ in range(options.rounds):
            empty_page_cache(folder)
            times["plain"].append(plain(folder))
            store = TierStore(size, IDENTITY, size * count, with_files)
            empty_page_cache(folder)
            times["load"].append(load(store, keys))
            store.close()
    for what, seconds in times.items():
        rate = size * count / statistics.median(seconds) / 1e6
        print(f"{what:6} median {statistics.median(seconds):.3f} s, least {min(seconds):.3f} s   {rate:.0f} MB/s")
    print(f"ratio of medians {statistics.median(times['load']) / statistics.median(times['plain']):.2f}")


if __name__ == "__main__":
    main()
