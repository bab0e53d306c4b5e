"""Real files and real processes: `kill -9`, and two processes on one folder at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from fakes.faulty_disk import FaultyDisk
from fakes.tier_blocks import FOLDER, IDENTITY, OTHER, OWNER, SIZE, content, demote, fetch, key, persist, there
from obole.cache.tiers.io import OsDisk
from obole.cache.tiers.store import TierStore
from obole.types import Tier

ROOT = Path(__file__).resolve().parents[3]
BUDGET = 1024 * SIZE

WRITER = """
import sys
from pathlib import Path
from fakes.tier_blocks import IDENTITY, OTHER, SIZE, fetch, persist
from obole.cache.tiers.store import TierStore
folder, first, count, budget = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = TierStore(SIZE, IDENTITY, 0, (folder, budget))
for start in range(first, first + count, 10):
    persist(store, range(start, start + 10), OTHER)
print(len(fetch(store, range(first, first + 10))), flush=True)
sys.stdin.readline()
store.close()
"""


def start(folder: Path, first: int, count: int, budget: int = BUDGET) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "PYTHONHASHSEED": str(first)}
    command = [sys.executable, "-c", WRITER, str(folder), str(first), str(count), str(budget)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def size_of(folder: Path) -> int:
    return sum(listed.size for listed in OsDisk().list(folder))


def test_kill_minus_nine_again_and_again():
    command = [sys.executable, str(ROOT / "benchmarks" / "kill_drill.py"), "--rounds", "5", "--budget", str(1 << 28)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    counts = dict(part.split("=") for part in done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (counts["rounds"], counts["wrong"], counts["lost"]) == ("5", "0", "0")
    assert int(counts["found"]) > 0


def test_two_processes_on_one_folder(tmp_path):
    processes = [start(tmp_path, 1000, 100), start(tmp_path, 2000, 100)]
    store = TierStore(SIZE, IDENTITY, 0, (tmp_path, BUDGET))
    persist(store, range(50))
    for process in processes:
        assert process.stdout.readline() == "10\n"
    store._ssd._log.refresh()  # what happens every few seconds
    everything = [*range(50), *range(1000, 1100), *range(2000, 2100)]
    assert there(store, everything) == everything
    assert store.forget(OTHER) == 200  # what the others wrote, the segments that they write to included
    store.flush()
    written = b"".join(path.read_bytes() for path in tmp_path.glob("*.seg"))
    assert not any(bytes(content(n)) in written for n in everything[50:])
    for process in processes:
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    store.close()
    again = TierStore(SIZE, IDENTITY, 0, (tmp_path, BUDGET))
    assert there(again, everything) == list(range(50))
    again.close()


def test_two_processes_keep_to_one_budget(tmp_path):
    budget = 300 * SIZE
    processes = [start(tmp_path, 1000, 600, budget), start(tmp_path, 2000, 600, budget)]
    store = TierStore(SIZE, IDENTITY, 4 * SIZE, (tmp_path, budget))
    largest = 0
    for first in range(0, 600, 10):
        demote(store, range(first, first + 10))
        store.flush()
        largest = max(largest, size_of(tmp_path))
        found = fetch(store, range(first, first + 10))
        assert Tier.RAM in found or len(found) < 10
    for process in processes:
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert largest <= budget
    assert size_of(tmp_path) <= budget
    store.close()


def test_a_store_is_found_by_another_process_with_other_hash_seeds(tmp_path):
    process = start(tmp_path, 1000, 20)
    process.communicate("\n", timeout=60)
    store = TierStore(SIZE, IDENTITY, 0, (tmp_path, BUDGET))
    assert there(store, range(1000, 1020)) == list(range(1000, 1020))
    store.close()


def test_two_processes_write_the_same_block_at_once(tmp_path):
    stores = [
        TierStore(SIZE, IDENTITY, 0, (tmp_path, BUDGET)) for _ in range(2)
    ]  # locks belong to the open file, not the process
    for store in stores:
        persist(store, range(10), settle=False)
    for store in stores:
        store.flush()
        assert there(store, range(10)) == list(range(10))
    stores[0].forget(OWNER)
    stores[0].flush()
    stores[1]._ssd._log.refresh()
    assert [stores[1].where(key(n)) for n in range(10)] == [None] * 10
    for store in stores:
        store.close()
    assert not any(bytes(content(n)) in path.read_bytes() for n in range(10) for path in tmp_path.glob("*.seg"))


def test_forgetting_reaches_what_another_process_has_just_written_and_what_waits_there():
    disk = FaultyDisk()
    one, other = (TierStore(SIZE, IDENTITY, 8 * SIZE, (FOLDER, BUDGET), disk=disk) for _ in range(2))
    persist(other, range(10))  # since `one` looked last
    disk.latency = 0.3
    persist(other, [100], OTHER, settle=False)
    while other._ssd._queue:  # it is being written
        time.sleep(0.001)
    persist(other, range(20, 25), settle=False)
    demote(other, range(30, 35))
    disk.latency = 0.0
    one.forget(OWNER)
    one.flush()
    assert not any(bytes(content(n)) in disk.contents() for n in range(10))
    other._ssd._log.refresh()
    other.flush()
    other.close()
    one.close()
    assert not any(bytes(content(n)) in disk.contents() for n in range(40))
    assert bytes(content(100)) in disk.contents()


def test_many_small_blocks_are_written_and_read_at_once(tmp_path):
    """More pieces than the system takes in one call."""
    store = TierStore(256, IDENTITY, 0, (tmp_path, 16 << 20))
    with store._lock:  # the writer takes them together
        persist(store, range(2000), settle=False)
    store.flush()
    assert (store.stats().write_errors, store.stats().dropped_writes) == (0, 0)
    assert fetch(store, range(2000)) == [Tier.SSD] * 2000
    store.close()


def test_the_real_disk_reads_and_writes_in_pieces(tmp_path):
    disk = OsDisk()
    fd = disk.create(tmp_path / "file")
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    disk.write(fd, [data[:100], b"", data[100 : 1 << 20], data[1 << 20 :]], 64)
    into = [bytearray(7), np.zeros(1 << 20, np.uint8), bytearray(4 << 20)]
    assert disk.read(fd, into, 64) == 3 << 20
    assert b"".join(map(bytes, into))[: 3 << 20] == data.tobytes()
    other = disk.open(tmp_path / "file", write=True)
    assert not disk.lock(other)
    disk.close(fd)
    assert disk.lock(other)
    disk.sync(other)
    disk.resize(other, 10)
    assert disk.size(other) == 10
    disk.close(other)
    assert [listed.name for listed in disk.list(tmp_path)] == ["file"]
    disk.sync_folder(tmp_path)
    disk.remove(tmp_path / "file")
    assert disk.list(tmp_path) == []
