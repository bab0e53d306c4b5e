"""Hit rates of device pool, RAM and SSD on recorded traffic, under each eviction policy (matplotlib for --plot).

python benchmarks/cache_traces.py FILES... [--sizes 1,4,16] [--totals 0.05,0.15,0.4] [--json out.json] [--plot out.svg]

Reads traces that name their blocks: JSON lines as Mooncake publishes them (`hash_ids`, of blocks of 512 tokens), and archives
of agentic sessions (.tar.gz of JSON; ids are local to a session; sessions are woven together by their own clocks). The Azure
traces give lengths only: nothing can be said of what a cache would find, and they are refused.

No model runs and no byte moves. The policies are the very classes of `obole.cache.tiers.policy`, and blocks move as in
`TierStore`: the pool gives up what it has not used for longest, to RAM; RAM gives up by its policy, to SSD unless it is there;
SSD gets every block as it is computed, and keeps it by `LogPolicy`, segment by segment. A block counts as a hit if all blocks
before it in its prompt do. All tiers together are as large as a share of the different blocks of the trace (`--totals`).
`/lru`: hits as a share of those of one LRU of the size of all tiers together; `/all`: of a cache that never forgets.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from obole.cache.tiers.policy import Gdsf, LogPolicy, Lru, Policy, S3Fifo, Sieve

Prompt = list[bytes]
SEGMENTS = 64  # that the budget of the SSD is split into, as in `obole.cache.tiers.ssd`


def read_trace(path: Path, limit: int | None) -> list[Prompt]:
    """The prompts of a trace, in order of time, as keys of their blocks."""
    if path.name.endswith(".tar.gz"):
        prompts = _sessions(path)
    elif path.suffix == ".jsonl":
        with path.open() as lines:
            prompts = [[b"%d" % block for block in json.loads(line)["hash_ids"]] for line in lines]
    else:
        raise SystemExit(f"{path} does not name its blocks (the Azure traces do not), so there is nothing to replay.")
    return prompts[:limit]


def _sessions(path: Path) -> list[Prompt]:
    timed: list[tuple[float, int, Prompt]] = []
    with tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            file = archive.extractfile(member) if member.isfile() else None
            if file is None or not member.name.endswith(".json"):
                continue
            session = json.load(file)
            for request in _requests(session["requests"]):
                timed.append((request["t"], number, [b"%d:%d" % (number, block) for block in request["hash_ids"]]))
    return [prompt for _, _, prompt in sorted(timed, key=lambda item: item[:2])]


def _requests(items: list[dict]) -> Iterator[dict]:
    """Requests of a session, those of its sub-agents included."""
    for item in items:
        if "hash_ids" in item:
            yield item
        yield from _requests(item.get("requests", []))


@dataclass
class Segments:
    """The SSD tier without bytes: segments of keys, given up whole as `LogPolicy` says."""

    capacity: int
    policy: LogPolicy
    now: float = 0.0
    where: dict[bytes, int] = field(default_factory=dict)  # key: number of its segment
    rewritten: int = 0

    def __post_init__(self) -> None:
        self.size = max(1, self.capacity // SEGMENTS)
        self._number = 0
        self._keys: dict[int, list[bytes]] = {}
        self._sealed: dict[bool, deque[int]] = {True: deque(), False: deque()}
        self._open: dict[bool, int | None] = {True: None, False: None}

    def __contains__(self, key: bytes) -> bool:
        return key in self.where

    def add(self, key: bytes) -> None:
        self._append(key, self.policy.main(key), room=True)

    def _append(self, key: bytes, main: bool, *, room: bool) -> None:
        number = self._open[main]
        if number is None or len(self._keys[number]) >= self.size:
            if number is not None:
                self._sealed[main].append(number)
                self._open[main] = None
            if room:
                self._make_room()
            number = self._open[main]
            if number is None:
                self._number += 1
                number = self._open[main] = self._number
                self._keys[number] = []
        self._keys[number].append(key)
        self.where[key] = number

    def _make_room(self) -> None:
        while (len(self._keys) + 2) * self.size > self.capacity:
            sizes = {main: len(queue) + (self._open[main] is not None) for main, queue in self._sealed.items()}
            main = not self.policy.gives_copies(sizes[False], sizes[True])
            main = main if self._sealed[main] else not main
            number = self._sealed[main].popleft()
            for key in self._keys.pop(number):
                if self.where[key] != number:
                    continue
                if self.policy.survives(key, main, self.now):
                    self.rewritten += 1
                    self._append(key, True, room=False)
                else:
                    del self.where[key]


class Ram:
    """The RAM tier without bytes. `spare`: copies of what the pool has, which go first."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.spare: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self.policy or key in self.spare

    def rose(self, key: bytes) -> None:
        """The pool has it too from now on."""
        if key in self.policy:
            self.policy.remove(key)
        self.spare[key] = None

    def take(self, key: bytes) -> list[bytes]:
        """A block that the pool gave up; what is given up for it."""
        self.spare.pop(key, None)
        if key in self.policy:
            self.policy.hit(key)
            return []
        self.policy.add(key)
        while self.spare and len(self.policy) + len(self.spare) > self.capacity:
            self.spare.popitem(last=False)
        return [self.policy.victim() for _ in range(len(self.policy) - self.capacity)]


def replay(prompts: list[Prompt], sizes: tuple[int, int, int], ram_policy: Callable[[int], Policy], log: LogPolicy) -> dict:
    """Blocks asked for and found, by tier, and blocks written to SSD."""
    device, ram, ssd = Lru(), Ram(sizes[1], ram_policy(sizes[1])), Segments(sizes[2], log)
    found = {"device": 0, "ram": 0, "ssd": 0}
    asked = written = 0
    for prompt in prompts:
        asked += len(prompt)
        hits = 0
        for key in prompt:
            tier = "device" if key in device else "ram" if key in ram else "ssd" if key in ssd else None
            if tier is None:
                break
            found[tier] += 1
            hits += 1
            if tier != "device":
                log.hit(key)
                log.rose(key)
                if tier == "ram":
                    ram.rose(key)
        for key in prompt[hits:]:
            if key not in device:
                log.missed(key)
                log.rose(key)
                if key not in ssd:
                    ssd.add(key)
                    written += 1
        for key in reversed(prompt):  # the pool lets go of the end of a sequence first
            if key in device:
                device.hit(key)
            else:
                device.add(key)
        while len(device) > sizes[0]:
            for key in ram.take(device.victim()):
                if log.sank(key) and key not in ssd:
                    ssd.add(key)
                    written += 1
    return {"asked": asked, "found": found, "hits": sum(found.values()), "written": written, "rewritten": ssd.rewritten}


def leading(prompt: Prompt, kept: Container[bytes]) -> int:
    """Blocks that a prompt begins with and that are all there: what comes after the first gap is of no use."""
    return next((i for i, key in enumerate(prompt) if key not in kept), len(prompt))


def ideal(prompts: list[Prompt], capacity: int | None) -> int:
    """Hits of one LRU, or of a cache that never forgets."""
    kept: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        hits += leading(prompt, kept)
        for key in reversed(prompt):
            kept[key] = None
            kept.move_to_end(key)
        while capacity is not None and len(kept) > capacity:
            kept.popitem(last=False)
    return hits


def one_tier(prompts: list[Prompt], capacity: int, policy: Policy) -> int:
    """Hits of a single tier of this size."""
    hits = 0
    for prompt in prompts:
        hits += leading(prompt, policy)
        for key in reversed(prompt):
            if key in policy:
                policy.hit(key)
            else:
                policy.add(key)
        while len(policy) > capacity:
            policy.victim()
    return hits


POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": lambda _: Lru(),
    "sieve": lambda _: Sieve(),
    "gdsf": lambda _: Gdsf(),
    "s3fifo": S3Fifo,
    "s3fifo 50%": lambda capacity: S3Fifo(capacity, small=0.5),
}
TIERS: dict[str, tuple[str, Callable[[int], LogPolicy]]] = {
    "tiers, as in obole": ("lru", LogPolicy),
    "tiers, never selective": ("lru", lambda capacity: LogPolicy(capacity, thrash=math.inf)),
    "tiers, fifo for clock": ("lru", lambda capacity: LogPolicy(capacity, rounds=0)),
    "tiers, 1/4 copies": ("lru", lambda capacity: LogPolicy(capacity, share=0.25)),
    "tiers, gdsf in RAM": ("gdsf", LogPolicy),
}


def measure(path: Path, limit: int | None, shares: list[float], sizes: tuple[int, int, int], policies: bool) -> list[dict]:
    """One row for each total size and policy."""
    prompts = read_trace(path, limit)
    asked, distinct = sum(map(len, prompts)), len({key for prompt in prompts for key in prompt})
    unbounded = ideal(prompts, None)
    print(f"{path.name}: {len(prompts)} requests, {asked} blocks, {distinct} different")
    print(f"  a cache that never forgets finds {unbounded / asked:.1%}")
    rows = []
    for share in shares:
        unit = max(1, int(distinct * share / sum(sizes)))
        total = unit * sum(sizes)
        lru = ideal(prompts, total)
        print(f"  all tiers {share:.0%} of the different blocks, {total}: one LRU finds {lru / unbounded:.1%} of that")
        results: list[tuple[str, dict]] = []
        if policies:
            results += [
                (f"one tier, {name}", {"hits": one_tier(prompts, total, make(total))}) for name, make in POLICIES.items()
            ]
        device, ram, ssd = (unit * size for size in sizes)
        for name, (policy, log) in TIERS.items():
            results.append((name, replay(prompts, (device, ram, ssd), POLICIES[policy], log(ssd))))
        for name, result in results:
            row = {"trace": path.name, "total": share, "policy": name, "per_lru": result["hits"] / lru} | result
            row["per_unbounded"] = result["hits"] / unbounded
            rows.append(row)
            detail = ""
            if "found" in result:
                found = ", ".join(f"{tier} {hits / result['hits']:.0%}" for tier, hits in result["found"].items())
                written = (result["written"] + result["rewritten"]) / distinct
                detail = f"   found in {found}; {written:.1f} writes for each different block"
            print(f"    {name:24} /lru {row['per_lru']:.3f}  /all {row['per_unbounded']:.3f}{detail}", flush=True)
    return rows


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib.pyplot as plt

    traces = sorted({row["trace"] for row in rows})
    figure, axes = plt.subplots(1, len(traces), figsize=(4.5 * len(traces), 3.8), layout="constrained", squeeze=False)
    for axis, trace in zip(axes[0], traces, strict=True):
        for name in sorted({row["policy"] for row in rows}):
            points = sorted((row["total"], row["per_lru"]) for row in rows if row["trace"] == trace and row["policy"] == name)
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xlabel="size of all tiers / different blocks", ylabel="hits / hits of one LRU", title=trace)
    axes[0][-1].legend(fontsize=6)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--sizes", default="1,4,16", help="of device pool, RAM and SSD, in proportion")
    parser.add_argument("--totals", default="0.05,0.15,0.4", help="size of all tiers as shares of the different blocks")
    parser.add_argument("--requests", type=int, default=10_000, help="at most so many of each trace")
    parser.add_argument("--tiers-only", action="store_true", help="leave out the policies in a single tier")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    device, ram, ssd = map(int, options.sizes.split(","))
    shares = [float(share) for share in options.totals.split(",")]
    rows: list[dict] = []
    for path in options.files:
        rows += measure(path, options.requests, shares, (device, ram, ssd), not options.tiers_only)
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "cache_traces", "sizes": options.sizes, "rows": rows}, indent=1))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
