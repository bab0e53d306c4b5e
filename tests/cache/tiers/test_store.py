"""RAM and SSD as one: what moves where, what is found again, what is held and what is forgotten."""

from __future__ import annotations

import dataclasses
import random
import time

import numpy as np
import pytest

from fakes.tier_blocks import FOLDER, IDENTITY, OTHER, OWNER, SIZE, content, contents, demote, fetch, key, name, persist, there
from obole.cache.tiers.store import TierStore
from obole.errors import ConfigError
from obole.types import Tier

RAM, SSD = Tier.RAM, Tier.SSD


def test_blocks_go_down_a_tier_and_come_up_as_they_were(disk, open_store):
    store = open_store(disk, ram=4)
    demote(store, range(4))
    assert [store.where(key(n)) for n in range(5)] == [RAM] * 4 + [None]
    demote(store, range(4, 10))
    store.flush()
    assert [store.where(key(n)) for n in range(10)] == [SSD] * 6 + [RAM] * 4
    assert fetch(store, range(10)) == [SSD] * 6 + [RAM] * 4
    stats = store.stats()
    assert (stats.tiers[RAM].blocks, stats.tiers[SSD].blocks) == (4, 6)
    assert (stats.tiers[RAM].blocks_written, stats.tiers[SSD].blocks_written) == (10, 6)
    assert (stats.tiers[RAM].blocks_read, stats.tiers[SSD].blocks_read) == (4, 6)
    assert stats.tiers[SSD].bytes_read == 6 * SIZE
    assert stats.misses == {}


def test_each_tier_alone(disk, open_store):
    ram, ssd = open_store(None, ram=2), open_store(disk)
    for store in (ram, ssd):
        demote(store, range(3))
        store.flush()
    assert [ram.where(key(n)) for n in range(3)] == [None, RAM, RAM]
    assert [ssd.where(key(n)) for n in range(3)] == [SSD] * 3
    assert not ram.wants(key(9))
    assert ram.seconds([key(1)]) == 0.0
    assert set(ram.stats().tiers) == {RAM}


def test_what_is_computed_is_written_once(disk, open_store):
    store = open_store(disk, ram=8)
    assert store.wants(key(0))
    persist(store, [0, 1])
    assert not store.wants(key(0))
    demote(store, [0, 1])
    demote(store, range(10, 18))  # pushes 0 and 1 out of RAM
    store.flush()
    assert store.stats().tiers[SSD].blocks_written == 2
    assert fetch(store, [0, 1]) == [SSD, SSD]


def test_a_load_ends_at_the_first_block_that_is_nowhere(disk, open_store):
    store = open_store(disk, ram=2)
    persist(store, [0, 1, 3])
    assert fetch(store, [0, 1, 2, 3]) == [SSD, SSD]
    assert fetch(store, [2, 3]) == []
    load = store.load([key(0)])
    with pytest.raises(IndexError):
        load.block(1)
    load.close()
    load.close()
    assert load.over


def test_blocks_from_ssd_are_in_ram_afterwards_if_there_is_room(disk, open_store):
    store = open_store(disk, ram=4)
    persist(store, range(4))
    assert fetch(store, range(4)) == [SSD] * 4
    assert fetch(store, range(4)) == [RAM] * 4
    demote(store, [10, 11, 12, 13])  # blocks that RAM alone has go before copies of what the pool has
    assert [store.where(key(n)) for n in (0, 1, 2, 3, 10, 11, 12, 13)] == [SSD] * 4 + [RAM] * 4
    assert fetch(store, range(4)) == [SSD] * 4  # no room: a copy never drives out a block that only RAM has
    assert store.where(key(10)) is RAM


def test_blocks_of_a_load_stay_while_others_come(disk, open_store):
    store = open_store(disk, ram=4)
    demote(store, range(4))
    load = store.load([key(n) for n in range(4)])
    assert load.ready == 4
    demote(store, range(10, 30))
    store.flush()
    assert [bytes(load.block(n)) for n in range(4)] == [bytes(content(n)) for n in range(4)]
    load.close()
    demote(store, range(30, 40))
    assert [store.where(key(n)) for n in range(36, 40)] == [RAM] * 4


def test_held_blocks_stay_in_both_tiers(disk, open_store):
    now = [0.0]
    store = open_store(disk, ram=4, clock=lambda: now[0])
    store.hold([key(0), key(1)], 100.0)
    demote(store, range(60))
    assert [store.where(key(n)) for n in (0, 1, 2)][:2] == [RAM, RAM]
    persist(store, [900, 901])
    store.hold([key(900), key(901)], 100.0)
    for start in range(1000, 3000, 100):
        persist(store, range(start, start + 100))
    assert store.where(key(1000)) is None
    assert fetch(store, [900, 901]) == [SSD, SSD]
    now[0] = 200.0
    for start in range(3000, 5000, 100):
        for part in range(start, start + 100, 20):
            demote(store, range(part, part + 20))
            store.flush()
    assert [store.where(key(n)) for n in (0, 1)].count(RAM) == 0
    assert fetch(store, [900, 901]) == []


def test_too_much_held_is_not_held_for_ever(disk, open_store):
    store = open_store(disk)
    numbers = range(400)
    store.hold([key(n) for n in numbers], 1e9)
    for start in range(0, 400, 50):
        persist(store, numbers[start : start + 50])
    assert store.stats().dropped_writes == 0
    assert sum(f.size for f in disk.list(FOLDER)) <= 256 * SIZE
    assert fetch(store, [399])


def test_the_budget_is_kept_by_the_folder_as_a_whole(disk, open_store):
    store = open_store(disk, ram=4)
    for start in range(0, 3000, 60):
        persist(store, range(start, start + 60))
        assert sum(f.size for f in disk.list(FOLDER)) <= 256 * SIZE
    blocks = store.stats().tiers[SSD].blocks
    assert blocks > 256 * 0.6  # headers are a fifth of blocks as small as these
    found = there(store, range(3000))
    assert len(found) == blocks
    assert found[-1] == 2999


def test_used_blocks_outlive_others(disk, open_store):
    store = open_store(disk)
    demote(store, range(20))
    store.flush()
    for start in range(1000, 1120, 20):
        demote(store, range(start, start + 20))
        store.flush()
    assert fetch(store, range(20)) == [SSD] * 20
    demote(store, range(20))  # and given up by the pool again
    for start in range(2000, 2160, 20):
        demote(store, range(start, start + 20))
        store.flush()
    assert fetch(store, range(20)) == [SSD] * 20
    assert store.where(key(1000)) is None


def test_a_restart_finds_everything_of_an_orderly_end(disk, open_store):
    store = open_store(disk, ram=4)
    persist(store, range(30))
    demote(store, range(100, 104))  # in RAM alone
    store.close()
    again = open_store(disk, ram=4)
    assert fetch(again, [*range(30), *range(100, 104)]) == [SSD] * 34
    assert again.stats().misses == {}


def test_neighbours_are_read_in_one_go(disk, open_store):
    store = open_store(disk, budget=2048 * SIZE)
    persist(store, range(20), settle=False)
    store.flush()
    disk.reads.clear()
    assert fetch(store, range(20)) == [SSD] * 20
    assert len(disk.reads) == 1


def test_forgetting_an_owner_leaves_nothing_of_its_own(disk, open_store):
    store = open_store(disk, ram=8)
    persist(store, range(40))
    persist(store, range(40, 60), OTHER)
    demote(store, range(60, 64))
    demote(store, range(64, 68), OTHER)
    store.put_document(name(0).owner, b"a", b"secret of one")
    store.put_document(OTHER, b"a", b"secret of another")
    store.flush()
    assert store.forget(name(0).owner) == 44
    assert [store.where(key(n)) for n in (0, 39, 60)] == [None] * 3
    store.flush()
    whole = disk.contents()
    assert not any(bytes(content(n)) in whole or key(n) in whole for n in range(40))
    assert b"secret of one" not in whole
    assert all(bytes(content(n)) in whole for n in range(40, 60))
    assert fetch(store, [*range(40, 60), *range(64, 68)]) == [SSD] * 20 + [RAM] * 4
    assert [(owner, data) for owner, _, data, _ in store.documents()] == [(OTHER, b"secret of another")]
    persist(store, [0])  # a new beginning
    assert fetch(store, [0]) == [SSD]
    store.close()
    again = open_store(disk)
    assert there(again, range(60)) == [0, *range(40, 60)]
    assert again.forget(b"?" * 16) == 0


def test_forgetting_reaches_blocks_that_wait_to_be_written(disk, open_store):
    store = open_store(disk)
    disk.latency = 0.05
    persist(store, range(30), settle=False)
    assert store.forget(name(0).owner) == 30
    store.flush()
    disk.latency = 0.0
    assert there(store, range(30)) == []
    assert not any(bytes(content(n)) in disk.contents() for n in range(30))


def test_documents_the_newest_of_a_name_wins(disk, open_store):
    store = open_store(disk)
    for text in (b"old", b"new"):
        store.put_document(OTHER, b"n", text)
    store.put_document(OTHER, b"m", b"")
    store.flush()
    assert [d[:3] for d in store.documents()] == [(OTHER, b"m", b""), (OTHER, b"n", b"new")]
    for start in range(0, 2000, 50):  # many blocks later
        persist(store, range(start, start + 50))
    store.close()
    again = open_store(disk)
    assert [d[:3] for d in again.documents()] == [(OTHER, b"m", b""), (OTHER, b"n", b"new")]
    assert all(0 <= age < 60 for *_, age in again.documents())


def test_documents_have_a_share_of_the_budget_and_no_more(disk, open_store):
    store = open_store(disk)
    for number in range(100):
        store.put_document(OTHER, b"%d" % number, bytes([number]) * 1000)
        store.flush()
    found = list(store.documents())
    assert [int(d[1]) for d in found] == list(range(99, 99 - len(found), -1))
    assert 10 <= len(found) <= 256 * SIZE // 16 // 1000
    store.put_document(OTHER, b"large", bytes(200_000))
    assert store.stats().dropped_writes == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_books_of_documents_balance(disk, open_store, seed):
    """Replaced, forgotten, beyond their share, and read again by a restart: bytes and texts are those of a simple model."""
    chance = random.Random(seed)
    store = open_store(disk)
    kept: dict[tuple[bytes, bytes], bytes] = {}
    for _ in range(200):
        owner, label = chance.choice([OWNER, OTHER]), b"%d" % chance.randrange(12)
        if chance.random() < 0.03:
            store.forget(owner)
            kept = {which: data for which, data in kept.items() if which[0] != owner}
            continue
        kept.pop((owner, label), None)
        kept[owner, label] = chance.randbytes(chance.randrange(2500))
        store.put_document(owner, label, kept[owner, label])
        while sum(4 + len(which[1]) + len(data) for which, data in kept.items()) > store._ssd.document_bytes:
            del kept[next(iter(kept))]
        store.flush()
        assert store.stats().document_bytes == sum(4 + len(which[1]) + len(data) for which, data in kept.items())
    assert [((owner, label), data) for owner, label, data, _ in store.documents()] == [*reversed(kept.items())]
    again = [((owner, label), data) for owner, label, data, _ in open_store(disk.killed()).documents()]
    assert again[: len(kept)] == [*reversed(kept.items())]  # then those that had to make way, and are on disk still


def test_a_document_comes_while_as_many_as_may_wait_are_being_written(disk, open_store):
    store = open_store(disk, budget=64 * SIZE)
    disk.latency = 0.2
    assert 3000 < store._ssd.document_bytes < 6000
    store.put_document(OTHER, b"one", bytes(3000))
    while store._ssd._queue:
        time.sleep(0.001)
    store.put_document(OTHER, b"two", bytes(3000))
    store.put_document(OTHER, b"three", bytes(3000))  # in the place of the second, which waits
    disk.latency = 0.0
    store.flush()
    assert [d[1] for d in store.documents()] == [b"three"]
    assert store.stats().dropped_writes == 1


def test_blocks_in_ram_are_written_behind_and_stay_what_they_were(disk, open_store):
    store = open_store(disk, ram=4)
    demote(store, range(4))
    store.persist_from_ram([name(n) for n in range(6)])
    store.flush()
    assert store.stats().tiers[SSD].blocks_written == 4
    assert there(open_store(disk.killed(), ram=4), range(6)) == list(range(4))
    demote(store, [9])
    assert [store.where(key(n)) for n in (*range(4), 9)] == [SSD, RAM, RAM, RAM, RAM]  # the oldest goes, as before
    open_store(None, ram=4).persist_from_ram([name(0)])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((SIZE, b"short", 0, None), "32 bytes"),
        ((SIZE, IDENTITY, SIZE - 1, None), "RAM"),
        ((SIZE, IDENTITY, 0, (FOLDER, 9)), "kv_ssd of 9 bytes is too small"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(arguments, what):
    with pytest.raises(ConfigError, match=what):
        TierStore(*arguments)


def test_stats_are_a_snapshot(open_store):
    store = open_store(None, ram=2)
    stats = store.stats()
    demote(store, [1])
    assert stats.tiers[RAM].blocks == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.documents = 1


def test_blocks_are_copied_on_their_way_down(open_store):
    store = open_store(None, ram=2)
    block = np.array(contents([5]))
    store.demote([name(5)], block)
    block[:] = 0
    assert fetch(store, [5]) == [RAM]


def test_a_closed_store_takes_nothing_and_gives_what_it_has(disk, open_store):
    store = open_store(disk, ram=2)
    demote(store, [1])
    store.close()
    demote(store, [2])
    persist(store, [3], settle=False)
    assert [store.where(key(n)) for n in (1, 2, 3)] == [RAM, None, None]
