"""What disks do: every fault is a miss, counted by reason, and never a wrong block, an error or a wait without end."""

from __future__ import annotations

import errno
import random
import time

import pytest

from fakes.faulty_disk import FaultyDisk
from fakes.tier_blocks import FOLDER, OTHER, SIZE, content, contents, demote, fetch, key, name, persist, there
from obole.cache.tiers import record
from obole.types import Tier

COUNT = 20
ROOMY = 4096 * SIZE  # all of them in one segment


def segment(disk: FaultyDisk) -> bytearray:
    """The contents of the only segment."""
    (path,) = disk.segments()
    return disk.files[path].data


def place_of(data: bytearray, number: int) -> int:
    """Where the record of a block begins."""
    return data.find(bytes(content(number))) - record.HEADER


def forge(data: bytearray, number: int, **fields: object) -> None:
    """Rewrite a header, with a right checksum."""
    segment_number, _, _ = record.unpack_segment(bytes(data[:64]))
    place = place_of(data, number)
    header = record.unpack(data[place : place + record.HEADER], segment_number, place)
    values = {field: getattr(header, field) for field in header.__slots__} | fields
    data[place : place + record.HEADER] = record.pack(record.Header(**values), segment_number, place)


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_is_a_miss_while_running_and_after_a_restart(disk, open_store, seed):
    chance = random.Random(seed)
    store = open_store(disk, budget=ROOMY)
    persist(store, range(COUNT))
    if chance.random() < 0.5:
        store.close()
        store = open_store(disk, budget=ROOMY)
    data = segment(disk)
    hit = chance.randrange(COUNT)
    place = place_of(data, hit)
    bit = chance.randrange((record.HEADER + SIZE) * 8) if seed > 3 else (record.HEADER + 10) * 8
    data[place + bit // 8] ^= 1 << bit % 8
    assert len(fetch(store, range(COUNT))) == hit
    assert store.where(key(hit)) is None
    assert store.wants(key(hit))
    assert sum(store.stats().misses.values()) == 1
    assert there(store, range(COUNT)) == [n for n in range(COUNT) if n != hit]
    persist(store, [hit])  # computed and written again
    assert len(fetch(store, range(COUNT))) == COUNT
    store.close()
    again = open_store(disk, budget=ROOMY)
    assert set(range(COUNT)) - set(there(again, range(COUNT))) <= {hit}


def test_a_damaged_payload_counts_as_checksum(disk, open_store):
    store = open_store(disk, budget=ROOMY)
    persist(store, range(3))
    segment(disk)[place_of(segment(disk), 1) + record.HEADER] ^= 1
    assert fetch(store, range(3)) == [Tier.SSD]
    assert store.stats().misses == {"checksum": 1}


@pytest.mark.parametrize("seed", range(8))
def test_a_truncated_segment_serves_what_is_left(disk, open_store, seed):
    store = open_store(disk, budget=ROOMY)
    persist(store, range(COUNT))
    alive = seed % 2 == 0
    if not alive:
        store.close()
    data = segment(disk)
    size = random.Random(seed).randrange(len(data))
    whole = [n for n in range(COUNT) if place_of(data, n) >= 0 and place_of(data, n) + record.HEADER + SIZE <= size]
    del data[size:]
    store = store if alive else open_store(disk, budget=ROOMY)
    assert there(store, range(COUNT)) == whole
    if alive and len(whole) < COUNT:
        assert set(store.stats().misses) == {"truncated"}


def test_an_empty_file_and_one_of_noise_are_nothing(disk, open_store):
    store = open_store(disk)
    persist(store, range(3))
    store.close()
    for stem, data in (("0" * 16, b""), ("1" * 16, random.Random(0).randbytes(5000)), ("2" * 16, bytes(5000))):
        fd = disk.create(FOLDER / f"{stem}.seg")
        disk.write(fd, [data], 0)
        disk.close(fd)
    assert there(open_store(disk), range(3)) == [0, 1, 2]


@pytest.mark.parametrize("while_running", [True, False])
def test_swapped_files_never_give_another_block(disk, open_store, while_running):
    store = open_store(disk, budget=64 * SIZE)  # small segments
    persist(store, range(COUNT))
    if not while_running:
        store.close()
    one, two, *_ = disk.segments()
    disk.files[one], disk.files[two] = disk.files[two], disk.files[one]
    store = store if while_running else open_store(disk, budget=64 * SIZE)
    found = there(store, range(COUNT))
    assert len(found) < COUNT
    assert sum(store.stats().misses.values()) > 0


def test_swapped_payloads_never_give_another_block(disk, open_store):
    store = open_store(disk, budget=ROOMY)
    persist(store, range(2))
    data = segment(disk)
    a, b = (place_of(data, n) + record.HEADER for n in (0, 1))
    data[a : a + SIZE], data[b : b + SIZE] = data[b : b + SIZE], data[a : a + SIZE]
    assert there(store, range(2)) == []


def test_other_weights_under_the_same_name(disk, open_store):
    store = open_store(disk, budget=ROOMY)
    persist(store, range(COUNT))
    store.close()
    before = bytes(segment(disk))
    other = open_store(disk, budget=ROOMY, identity=b"j" * 32)
    assert there(other, range(COUNT)) == []
    assert other.wants(key(0))
    assert other.stats().misses == {"identity": COUNT}
    other.close()
    assert bytes(disk.files[disk.segments()[0]].data) == before
    assert there(open_store(disk, budget=ROOMY), range(COUNT)) == list(range(COUNT))


def test_another_size_of_block_is_another_identity(disk, open_store):
    store = open_store(disk)
    persist(store, range(3))
    store.close()
    assert there(open_store(disk, size=2 * SIZE), range(3)) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"identity": b"j" * 32}, "identity"),
        ({"kind": record.Kind.DELETED}, "deleted"),
        ({"key": key(99)}, "misplaced"),
        ({"owner": OTHER}, "misplaced"),
    ],
)
def test_a_header_that_is_not_the_one_looked_for_is_a_miss_by_reason(disk, open_store, fields, reason):
    store = open_store(disk, budget=ROOMY)
    persist(store, range(2))
    forge(segment(disk), 1, **fields)
    assert fetch(store, range(2)) == [Tier.SSD]
    assert store.stats().misses == {reason: 1}


def test_a_stale_format_is_left_alone_and_not_served(disk, open_store):
    store = open_store(disk, budget=ROOMY)
    persist(store, range(3))
    store.close()
    segment(disk)[8:10] = (record.VERSION + 1).to_bytes(2, "little")
    before = bytes(segment(disk))
    again = open_store(disk)
    assert there(again, range(3)) == []
    assert again.stats().misses == {"version": 1}
    assert bytes(segment(disk)) == before
    for start in range(100, 2000, 50):  # but the budget is the budget
        persist(again, range(start, start + 50))
    assert sum(f.size for f in disk.list(FOLDER)) <= 256 * SIZE


def test_a_record_of_another_format_version_is_not_served(disk, open_store):
    store = open_store(disk, budget=ROOMY)
    persist(store, range(3))
    place = place_of(segment(disk), 1)
    segment(disk)[place + 8] += 1
    assert fetch(store, range(3)) == [Tier.SSD]
    assert store.stats().misses == {"version": 1}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_left_in_peace_and_tried_again(disk, open_store, code):
    now = [0.0]
    store = open_store(disk, ram=4, clock=lambda: now[0])
    persist(store, range(5))
    disk.failing = {"write": code}
    persist(store, range(5, 10))
    assert store.stats().write_errors == 1
    assert store.stats().dropped_writes == 5
    assert not store.wants(key(20))
    assert fetch(store, range(5)) == [Tier.SSD] * 5  # reading goes on
    persist(store, range(10, 15))
    assert store.stats().write_errors == 1
    disk.failing = {}
    now[0] += 60.0
    assert store.wants(key(20))
    persist(store, range(20, 25))
    assert fetch(store, range(20, 25)) == [Tier.SSD] * 5
    assert there(store, range(20)) == list(range(5))
    store.close()
    assert there(open_store(disk), range(25)) == [*range(5), *range(20, 25)]


def test_a_full_disk(disk, open_store):
    store = open_store(disk)
    persist(store, range(4))
    disk.space = 10 * SIZE
    persist(store, range(4, 40))
    assert store.stats().write_errors >= 1
    found = there(store, range(40))
    assert found[:4] == [0, 1, 2, 3]
    store.close()
    disk.space = None
    assert set(found) <= set(there(open_store(disk), range(40)))


def test_on_a_full_disk_the_new_takes_the_place_of_the_old(disk, open_store):
    now = [0.0]
    store = open_store(disk, clock=lambda: now[0])
    disk.space = 40 * SIZE  # of a budget of 256
    for start in range(0, 400, 4):
        persist(store, range(start, start + 4))
        now[0] += 1000.0
    assert store.stats().write_errors >= 2
    assert disk.segments() == [path for path in disk.segments() if disk.files[path].data]
    found = there(store, range(400))
    assert len(found) >= 8
    assert min(found) > 300
    disk.space = None
    persist(store, range(400, 440))
    assert there(store, range(400, 440)) == list(range(400, 440))


def test_no_file_is_left_by_a_segment_that_cannot_be_begun(disk, open_store):
    now = [0.0]
    store = open_store(disk, clock=lambda: now[0])
    disk.failing = {"write": errno.ENOSPC}
    for start in range(3):
        persist(store, [start])
        now[0] += 1000.0
    assert store.stats().write_errors == 3
    assert disk.segments() == []
    disk.failing = {}
    persist(store, [3])
    assert there(store, range(4)) == [3]


@pytest.mark.parametrize("operation", ["sync", "resize", "list", "create", "remove", "sync_folder", "open"])
def test_any_other_operation_may_fail(disk, open_store, operation):
    now = [0.0]
    store = open_store(disk, clock=lambda: now[0])
    persist(store, range(4))
    disk.failing = {operation: errno.EIO}
    for start in range(10, 500, 10):
        persist(store, range(start, start + 10))
        now[0] += 1000.0
    store.forget(OTHER)
    store.put_document(OTHER, b"n", b"text")
    store.flush()
    list(store.documents())
    there(store, range(0, 500, 50))
    disk.failing = {}
    now[0] += 10_000.0
    persist(store, range(500, 510))
    demote(store, range(510, 520))
    store.flush()
    assert fetch(store, range(510, 520)) == [Tier.SSD] * 10
    store.close()
    there(open_store(disk), range(520))


def test_read_errors_are_misses(disk, open_store):
    store = open_store(disk)
    persist(store, range(3))
    disk.failing = {"read": errno.EIO}
    assert fetch(store, range(3)) == []
    disk.failing = {}
    assert store.stats().misses["io_error"] == 3


def test_a_folder_that_vanishes_is_made_anew(disk, open_store):
    store = open_store(disk, ram=2)
    persist(store, range(6))
    disk.vanish(FOLDER)
    assert fetch(store, range(6)) == []
    assert store.stats().misses["vanished"] >= 1
    store._ssd._log.refresh()  # what happens every few seconds
    assert all(store.wants(key(n)) for n in range(6))
    persist(store, range(6))
    assert fetch(store, range(6)) == [Tier.SSD] * 6
    store.close()
    assert there(open_store(disk), range(6)) == list(range(6))


def test_a_segment_that_vanishes_is_a_miss(disk, open_store):
    store = open_store(disk, budget=64 * SIZE)
    persist(store, range(COUNT))
    disk.remove(disk.segments()[0])
    found = there(store, range(COUNT))
    assert 0 < len(found) < COUNT
    assert store.stats().misses["vanished"] == COUNT - len(found)


def test_a_slow_disk_keeps_nobody_waiting(disk, open_store):
    store = open_store(disk, ram=4)
    persist(store, range(10))
    disk.latency = 0.2
    begun = time.monotonic()
    persist(store, range(10, 18), settle=False)
    demote(store, range(20, 30))
    for n in range(30):
        store.where(key(n))
        store.wants(key(n))
    load = store.load([key(n) for n in range(10)])
    store.hold([key(0)], 1e9)
    store.forget(OTHER)
    assert store.seconds([key(n) for n in range(10)]) >= 0.0
    assert time.monotonic() - begun < 0.15
    assert not load.over
    assert fetch(store, range(10)) == [Tier.SSD] * 10
    assert store.seconds([key(n) for n in (4, 5)]) > 0.01  # it has been noticed
    load.close()


def test_a_disk_that_hangs_ends_a_load_and_counts(disk, open_store):
    store = open_store(disk, ram=4, stall_seconds=0.2)
    demote(store, [100])
    persist(store, range(4))
    disk.hanging.clear()
    load = store.load([key(100), key(0), key(1)])
    assert (load.ready, load.over) == (1, False)
    begun = time.monotonic()
    while not load.over:
        store.wait(0.05)
        assert time.monotonic() - begun < 3
    assert load.ready == 1
    assert bytes(load.block(0)) == bytes(content(100))
    assert store.seconds([key(0)]) > 0.05
    assert store.stats().misses == {"timeout": 1}
    load.close()
    demote(store, range(200, 210))  # nobody writes into memory that the hanging read may still write to
    disk.hanging.set()
    time.sleep(0.1)
    assert fetch(store, [209, 208]) == [Tier.RAM] * 2
    assert len(fetch(store, [0, 1])) == 2


def test_a_disk_that_falls_behind_drops_and_counts(disk, open_store):
    store = open_store(disk, queue_bytes=8 * SIZE)
    disk.latency = 0.05
    begun = time.monotonic()
    for start in range(0, 60, 4):
        persist(store, range(start, start + 4), settle=False)
    assert time.monotonic() - begun < 0.5
    store.flush()
    stats = store.stats()
    assert stats.dropped_writes > 0
    disk.latency = 0.0
    assert len(there(store, range(60))) == 60 - stats.dropped_writes == stats.tiers[Tier.SSD].blocks_written


@pytest.mark.parametrize("seed", range(40))
def test_after_a_power_cut_nothing_is_wrong_and_what_was_flushed_is_there(disk, open_store, seed):
    chance = random.Random(seed)
    flushed: set[int] = set()
    number = 0
    for _ in range(3):
        store = open_store(disk, budget=400 * SIZE)
        assert set(there(store, range(number))) >= flushed
        first = number
        for _ in range(chance.randrange(1, 8)):
            count = chance.randrange(1, 12)
            persist(store, range(number, number + count), settle=False)
            number += count
            if chance.random() < 0.4:
                store.flush()
                flushed.update(range(first, number))
            else:
                time.sleep(0.002)
        disk = disk.power_cut(chance) if seed % 4 else disk.killed()
    store = open_store(disk, budget=400 * SIZE)
    assert set(there(store, range(number))) >= flushed
    persist(store, range(number, number + 5))
    assert len(fetch(store, range(number, number + 5))) == 5


@pytest.mark.parametrize("seed", range(10))
def test_what_was_to_be_forgotten_is_forgotten_after_the_power_failed_meanwhile(disk, open_store, seed):
    chance = random.Random(seed)
    store = open_store(disk, budget=64 * SIZE)
    persist(store, range(COUNT))
    persist(store, range(COUNT, COUNT + 4), OTHER)
    disk.writes_left = chance.randrange(1, COUNT)
    store.forget(name(0).owner)
    store.flush()
    disk = disk.power_cut(chance)
    again = open_store(disk, budget=64 * SIZE)
    assert there(again, range(COUNT)) == []
    again.flush()
    assert not any(bytes(content(n)) in disk.contents() for n in range(COUNT))
    assert there(again, range(COUNT, COUNT + 4)) == list(range(COUNT, COUNT + 4))


def test_a_header_planted_in_a_document_is_not_believed(disk, open_store):
    store = open_store(disk, budget=ROOMY)
    planted = record.Header(record.Kind.BLOCK, SIZE, 1, b"i" * 32, OTHER, record.digest(content(1)), key(7))
    guess = b"".join(record.pack(planted, number, 0) for number in range(4))
    store.put_document(OTHER, b"n" * 60, bytes(60) + guess + bytes(contents([1])[0]))
    store.flush()
    store.close()
    data = segment(disk)
    data[64 + 100] ^= 1  # the document's own header is damaged, and the segment is searched
    (path,) = disk.segments()
    del disk.files[path].data[-64:]  # without its summary
    assert there(open_store(disk, budget=ROOMY), [7]) == []
