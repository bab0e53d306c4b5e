"""Kill a process that writes blocks, again and again, and look whether every block that is found afterwards is right.

`python benchmarks/kill_drill.py --rounds 200` starts a process on one folder, lets it write for a random time, and ends it with
SIGKILL. The next process first reads back every block that any process before it began to write, compares it with what it must
be, and then writes on. A block that a flush had confirmed and that is not found is a failure too, as is a single wrong byte.
The folder has room for all, so that nothing is given up on purpose.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from blake3 import blake3

from obole.cache.tiers.interface import BlockName, Bytes
from obole.cache.tiers.store import TierStore

OWNER = bytes(16)
IDENTITY = bytes(32)
BATCH = 16


def key(number: int) -> bytes:
    return blake3(b"key %d" % number).digest()


def content(number: int, size: int) -> Bytes:
    return np.frombuffer(blake3(b"content %d" % number).digest(length=size), np.uint8)


def work(folder: Path, size: int, budget: int, first: int, known: int) -> None:
    """The process that is killed: says `found N`, `wrong N`, then `begun N` and `flushed N` as it goes."""
    store = TierStore(size, IDENTITY, 8 * size, (folder, budget))
    found: list[int] = []
    wrong = start = 0
    while start < known:
        load = store.load([key(number) for number in range(start, min(start + 256, known))])  # ends at one that is not there
        while not load.over:
            store.wait(1.0)
        found += range(start, start + load.ready)
        wrong += sum(bytes(load.block(i)) != bytes(content(start + i, size)) for i in range(load.ready))
        start += load.ready + (load.ready < 256)
        load.close()
    print("found", *found, flush=True)
    print("wrong", wrong, flush=True)
    while True:
        numbers = range(first, first + BATCH)
        print("begun", first + BATCH, flush=True)
        store.persist([BlockName(key(n), OWNER) for n in numbers], np.stack([content(n, size) for n in numbers]))
        if random.random() < 0.3:
            store.flush()
            print("flushed", first + BATCH, flush=True)
        time.sleep(0.005)
        first += BATCH


def drill(folder: Path, rounds: int, size: int, budget: int, seed: int) -> dict[str, int]:
    """Run it. Counts: rounds, blocks found in all rounds, wrong ones, confirmed ones that were lost."""
    chance = random.Random(seed)
    known, confirmed = 0, set[int]()
    totals = {"rounds": 0, "found": 0, "wrong": 0, "lost": 0, "written": 0}
    for _ in range(rounds):
        command = [sys.executable, __file__, "--child", str(folder), str(size), str(budget), str(known), str(known)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = iter(process.stdout)
        found = set(map(int, next(lines).split()[1:]))
        totals["wrong"] += int(next(lines).split()[1])
        totals["found"] += len(found)
        totals["lost"] += len(confirmed - found)
        time.sleep(chance.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        first = known
        for line in lines:
            if not line.endswith("\n"):  # killed while it said so
                break
            word, _, number = line.partition(" ")
            if word == "begun":
                known = int(number)
            elif word == "flushed":
                confirmed |= set(range(first, int(number)))
        process.wait()
        totals["rounds"] += 1
        totals["written"] = known
        if totals["rounds"] % 20 == 0:
            print(" ".join(f"{name}={count}" for name, count in totals.items()), flush=True)
    return totals


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        work(Path(sys.argv[2]), *map(int, sys.argv[3:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=2 << 30, help="bytes; too few, and blocks go on purpose")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        totals = drill(Path(folder), options.rounds, options.block_bytes, options.budget, options.seed)
    print(" ".join(f"{name}={count}" for name, count in totals.items()))
    if totals["wrong"] or totals["lost"] or not totals["found"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
