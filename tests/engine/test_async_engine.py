"""The engine on its own thread: the same answers, whoever reads, leaves, comes too late or fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exact.common import fingerprints, random_params, random_prompt
from fakes.checkpoints import byte_vocabulary, table_logits, write_puppet
from obole import Engine, SamplingParams
from obole.engine.async_engine import AsyncEngine, AsyncStream
from obole.engine.async_stream import Unread
from obole.engine.results import Delta, Result
from obole.engine.runner import Runner
from obole.errors import ConfigError, EngineClosed, EngineFailure, InvalidRequest, Overloaded
from obole.types import FinishReason

ENDLESS = SamplingParams(ignore_eos=True)
ALPHABET = b"abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def no_complaints(caplog):
    """Neither asyncio nor the pools of threads have anything to say about what was left undone."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


@pytest.fixture
def puppet(tmp_path: Path):
    """An engine that says the alphabet over and over; closed, idle and balanced in the end."""
    table = list(range(len(byte_vocabulary())))
    for i, letter in enumerate(ALPHABET):
        table[letter] = ALPHABET[(i + 1) % len(ALPHABET)]
    engine = Engine(write_puppet(tmp_path / "puppet.gguf", table_logits(table), chat_template=TEMPLATE), kv_device=1 << 22)
    yield engine
    engine.close()
    engine._scheduler.check()


class Gate:
    """Lets steps through one by one while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.open = threading.Event()
        self.open.set()
        run = Runner.run

        def gated(runner, plan):
            assert self.open.wait(20)
            self.steps += 1
            return run(runner, plan)

        monkeypatch.setattr(Runner, "run", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


async def until(condition, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


async def read(stream: AsyncStream) -> Result:
    """The result, after checking that the deltas say the same."""
    ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    last = None
    async for last in stream:
        ids.setdefault(last.index, []).extend(last.token_ids)
        texts[last.index] = texts.get(last.index, "") + last.text
    result = stream.result
    assert last is not None
    assert last.result is result is not None
    for choice in result.choices:
        assert tuple(ids.get(choice.index, ())) == choice.token_ids
        assert texts.get(choice.index, "") == choice.text
    return result


def idle(engine: Engine) -> None:
    assert not engine._scheduler.has_work
    assert not engine._live
    engine._scheduler.check()


# -- the same answers -----------------------------------------------------------------------------------------------------


def requests(engine: Engine, count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    chosen = []
    for i in range(count):
        prompt = random_prompt(rng, rng.randint(1, 60), engine.vocab_size)
        params = random_params(rng, rng.randint(1, 24))
        if i % 4 == 0:
            params = SamplingParams(max_tokens=12, temperature=1.0, seed=i, n=2, logprobs=2)
        chosen.append((prompt, params))
    return chosen


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_concurrent_streams_say_what_generate_says(tiny_engine, arch):
    asked = requests(tiny_engine(arch), 32, seed=1)
    expected = tiny_engine(arch).generate([prompt for prompt, _ in asked], [params for _, params in asked])

    async def main() -> list[Result]:
        async with AsyncEngine(tiny_engine(arch, blocks=60)) as engine:

            async def one(prompt, params) -> Result:
                await asyncio.sleep(0.02 * rng.random())
                async with await engine.submit(prompt, params) as stream:
                    assert stream.prompt_tokens == len(prompt)
                    assert not stream.timed_out
                    return await read(stream)

            rng = random.Random(2)
            results = await asyncio.gather(*(one(*each) for each in asked))
            idle(engine.engine)
            return results

    assert fingerprints(asyncio.run(main())) == fingerprints(expected)


def test_cancelling_a_third_disturbs_nobody_else(tiny_engine):
    asked = requests(tiny_engine("llama"), 32, seed=3)
    expected = tiny_engine("llama").generate([prompt for prompt, _ in asked], [params for _, params in asked])
    rng = random.Random(4)
    doomed = set(rng.sample(range(32), 10))

    async def main() -> list[Result]:
        async with AsyncEngine(tiny_engine("llama", blocks=60)) as engine:

            async def one(i: int) -> Result:
                prompt, params = asked[i]
                async with await engine.submit(prompt, ENDLESS if i in doomed else params) as stream:
                    if i in doomed:
                        for _ in range(i % 5):
                            await anext(stream)
                        stream.cancel()
                        stream.cancel()
                        async for _ in stream:
                            pass
                        assert stream.result is not None
                        return stream.result
                    return await read(stream)

            results = await asyncio.gather(*(one(i) for i in range(32)))
            idle(engine.engine)
            assert engine.snapshot().blocks_used == engine.snapshot().running == engine.snapshot().waiting == 0
            return results

    results = asyncio.run(main())
    assert all(results[i].finish_reason is FinishReason.CANCELLED for i in doomed)
    kept = [i for i in range(32) if i not in doomed]
    assert fingerprints([results[i] for i in kept]) == fingerprints([expected[i] for i in kept])


def test_two_loops_share_an_engine(tiny_engine):
    asked = requests(tiny_engine("llama"), 8, seed=5)
    expected = tiny_engine("llama").generate([prompt for prompt, _ in asked], [params for _, params in asked])
    engine = AsyncEngine(tiny_engine("llama"))

    async def main() -> list[Result]:
        streams = [await engine.submit(prompt, params) for prompt, params in asked]
        return [await read(stream) for stream in streams]

    answers: list[list[Result]] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(main()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    asyncio.run(engine.close())
    assert [fingerprints(each) for each in answers] == [fingerprints(expected)] * 2


def test_texts_chats_and_tools(puppet):
    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            chat = [{"role": "user", "content": "xyz"}]
            tools = [{"name": "tool"}]
            assert await engine.count_tokens("xyz") == await engine.count_tokens(chat) == list(b"xyz")
            assert await engine.count_tokens(chat, tools) == list(b"toolxyz")
            stream = await engine.submit(chat, SamplingParams(max_tokens=3), tools=tools)
            assert stream.prompt_tokens == 7
            assert (await read(stream)).text == "abc"
            for wrong in ("", [], [1 << 20], "x" * 5000, 3, [{"role": "user"}], None):
                with pytest.raises(InvalidRequest):
                    await engine.submit(wrong)
            for odd in ({"params": 0}, {"tenant": None}, {"timeout": -1}, {"timeout": "1"}, {"tools": tools}):
                with pytest.raises(InvalidRequest):
                    await engine.submit("x", **odd)
            idle(puppet)

    asyncio.run(main())


# -- readers --------------------------------------------------------------------------------------------------------------


def test_a_slow_reader_gets_longer_deltas_and_all_of_the_text(puppet):
    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            stream = await engine.submit("a", SamplingParams(max_tokens=200, n=2))
            first = await anext(stream)
            await until(lambda: stream.result is not None)
            assert stream.stalled_seconds > 0
            rest = [delta async for delta in stream]
            assert len(rest) <= 2
            assert rest[-1].result is stream.result
            assert stream.stalled_seconds == 0
            for choice in stream.result.choices:
                deltas = [delta for delta in [first, *rest] if delta.index == choice.index]
                assert "".join(delta.text for delta in deltas) == choice.text == ("bcdefghijklmnopqrstuvwxyza" * 8)[:200]
                assert sum((delta.token_ids for delta in deltas), ()) == choice.token_ids
                assert deltas[-1].finish_reason is FinishReason.LENGTH

    asyncio.run(main())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.text(max_size=3))), max_size=40))
def test_unread_deltas_lose_nothing_and_keep_their_order(moves):
    clock = iter(range(1000))
    unread = Unread(lambda: next(clock))
    taken: list[Delta] = []
    pushed = [Delta(i, text, (len(text),), sources=(text,)) for i, text in filter(None, moves)]
    pushed.append(Delta(0, "end", (), FinishReason.STOP, Result("id", (), ())))
    source = iter(pushed)
    for move in [*moves, (0, "end")]:
        if move is not None:
            unread.push(next(source))
        elif unread:
            assert unread.seconds > 0
            taken.append(unread.take())
    while unread:
        taken.append(unread.take())
    assert unread.seconds == 0
    assert taken[-1].result is not None
    for index in range(3):
        assert "".join(d.text for d in taken if d.index == index) == "".join(d.text for d in pushed if d.index == index)
        for field in ("token_ids", "sources"):
            each = [[x for d in deltas if d.index == index for x in getattr(d, field)] for deltas in (taken, pushed)]
            assert each[0] == each[1]


def test_a_loop_is_called_once_a_step(puppet, gate):
    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            streams = [await engine.submit("a", SamplingParams(max_tokens=300)) for _ in range(16)]
            loop = asyncio.get_running_loop()
            calls, call = 0, loop.call_soon_threadsafe

            def counted(*args, **kwargs):
                nonlocal calls
                calls += 1
                return call(*args, **kwargs)

            loop.call_soon_threadsafe = counted
            before = gate.steps
            await asyncio.gather(*(read(stream) for stream in streams))
            loop.call_soon_threadsafe = call
            assert 100 < calls <= gate.steps - before + 1

    asyncio.run(main())


def test_who_reads_on_after_a_reader_was_cancelled_misses_nothing(puppet, gate):
    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            gate.open.clear()
            stream = await engine.submit("a", SamplingParams(max_tokens=30))
            gone = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)  # now it waits
            gone.cancel()
            rest = asyncio.create_task(read(stream))  # begins to wait before the other has heard of its end
            await asyncio.sleep(0)
            gate.open.set()
            async with asyncio.timeout(20):
                assert (await rest).text == ("bcdefghijklmnopqrstuvwxyza" * 2)[:30]
            assert gone.cancelled()

    asyncio.run(main())


def test_a_stream_that_is_left_or_dropped_is_cancelled(puppet):
    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            async with await engine.submit("a", ENDLESS) as left:
                await anext(left)
            await until(lambda: left.result is not None)
            assert left.result.finish_reason is FinishReason.CANCELLED
            dropped = await engine.submit("a", ENDLESS)
            await anext(dropped)
            del dropped
            gc.collect()
            await until(lambda: not puppet._live)
            idle(puppet)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(6))
def test_a_submission_that_is_cancelled_leaves_nothing_behind(puppet, turns):
    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            tasks = [asyncio.create_task(engine.submit("a", ENDLESS)) for _ in range(8)]
            for _ in range(turns):
                await asyncio.sleep(0.0003)
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            del task, tasks
            await until(lambda: not puppet._live and engine._arriving == 0 and engine._calls.empty())
            assert (await read(await engine.submit("a", SamplingParams(max_tokens=2)))).text == "bc"

    asyncio.run(main())


def test_a_loop_that_closes_takes_its_streams_with_it(puppet):
    engine = AsyncEngine(puppet)
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(engine.submit("a", ENDLESS))
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()

    async def main() -> None:
        await until(lambda: not puppet._live)
        assert (await read(await engine.submit("a", SamplingParams(max_tokens=2)))).text == "bc"
        await engine.close()

    asyncio.run(main())
    assert engine.healthy


# -- limits ---------------------------------------------------------------------------------------------------------------


def test_draining_waits_for_those_who_finish(puppet):
    async def main() -> None:
        engine = AsyncEngine(puppet)
        streams = [await engine.submit("a", SamplingParams(max_tokens=50)) for _ in range(4)]
        await engine.drain(20)
        results = [await read(stream) for stream in streams]
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        with pytest.raises(EngineClosed):
            await engine.submit("a")
        await engine.drain(0)
        await engine.close()
        await engine.close()
        await engine.drain(1)
        for refused in (engine.submit("a"), engine.count_tokens("a")):
            with pytest.raises(EngineClosed):
                await refused
        assert engine.healthy
        assert not engine._thread.is_alive()

    asyncio.run(main())


def test_draining_cuts_off_those_who_do_not(tiny_engine):
    async def main() -> None:
        engine = AsyncEngine(tiny_engine("llama", max_sequences=2))
        streams = [await engine.submit([5, 6], ENDLESS) for _ in range(4)]
        for stream in streams[:2]:
            await anext(stream)
        await engine.drain(0.01)
        idle(engine.engine)
        for stream in streams:
            deltas = [delta async for delta in stream]
            assert deltas[-1].result is stream.result is not None
            assert stream.result.finish_reason is FinishReason.CANCELLED
            assert not stream.timed_out
        await engine.close()

    asyncio.run(main())


def test_closing_ends_what_runs(puppet):
    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            stream = await engine.submit("a", ENDLESS)
        assert (await read(stream)).finish_reason is FinishReason.CANCELLED

    asyncio.run(main())


def test_deadlines_while_running_and_in_the_queue(tiny_engine, gate):
    async def main() -> None:
        async with AsyncEngine(tiny_engine("llama", max_sequences=1)) as engine:
            gate.open.clear()
            running = await engine.submit([5, 6], ENDLESS, timeout=0.05)
            waiting_task = asyncio.create_task(engine.submit([5, 7], ENDLESS, timeout=0.05))
            patient_task = asyncio.create_task(engine.submit([5, 8], SamplingParams(max_tokens=3), timeout=60))
            await asyncio.sleep(0.1)
            gate.open.set()
            waiting, patient = await waiting_task, await patient_task
            result = await read(patient)
            assert len(result.token_ids) == 3
            assert not patient.timed_out
            for stream in (running, waiting):
                assert (await read(stream)).finish_reason is FinishReason.CANCELLED
                assert stream.timed_out
            assert running.result.receipt.forward_passes == 1
            assert waiting.result.receipt.forward_passes == 0

    asyncio.run(main())


def test_more_than_may_wait_are_turned_away(tiny_engine, gate):
    async def main() -> None:
        params = SamplingParams(max_tokens=2)
        async with AsyncEngine(tiny_engine("llama", max_sequences=1), max_waiting=2) as engine:
            gate.open.clear()
            streams = [await engine.submit([5, 6], params)]
            await until(lambda: engine.snapshot().running == 1)
            tasks = [asyncio.create_task(engine.submit([5, 6], params)) for _ in range(3)]
            await asyncio.sleep(0.01)
            with pytest.raises(Overloaded):
                await tasks[2]
            gate.open.set()
            streams += [await task for task in tasks[:2]]
            for stream in streams:
                assert len((await read(stream)).token_ids) == 2
            await read(await engine.submit([5, 6], params))  # there is room again
            assert engine._arriving == 0

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [0, True, 1.5])
def test_a_wrong_limit_is_refused(puppet, wrong):
    with pytest.raises(ConfigError):
        AsyncEngine(puppet, max_waiting=wrong)


# -- failures -------------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_and_no_others(tiny_engine, monkeypatch):
    run, bad, failed = Runner.run, (9, 9, 9), []

    def failing(runner, plan):
        if not failed and any(seq.request.prompt_ids == bad and len(seq.tokens) > 6 for seq in plan.sequences):
            failed.append({seq.request.id for seq in plan.sequences})
            raise MemoryError("no room")
        return run(runner, plan)

    monkeypatch.setattr(Runner, "run", failing)
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=2)

    async def main() -> None:
        async with AsyncEngine(tiny_engine("llama", max_sequences=4)) as engine:
            streams = [await engine.submit(prompt, params) for prompt in ([5, 6], bad, [5, 7], [5, 8])]
            results = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
            for stream, result in zip(streams, results, strict=True):
                if stream.id in failed[0]:
                    assert isinstance(result, EngineFailure)
                    assert isinstance(result.__cause__, MemoryError)
                    # another answer to the same prompt may have ended before
                    assert any(choice.finish_reason is FinishReason.CANCELLED for choice in stream.result.choices)
                else:
                    assert result.finish_reason is FinishReason.LENGTH
            assert streams[1].id in failed[0]
            assert len(failed[0]) < 4
            assert engine.healthy
            idle(engine.engine)

    asyncio.run(main())


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_an_engine_that_cannot_go_on_fails_everybody(puppet, monkeypatch, error):
    async def main() -> None:
        engine = AsyncEngine(puppet)
        streams = [await engine.submit("a", ENDLESS) for _ in range(3)]
        await anext(streams[0])

        def broken(_):
            raise error("broken")

        monkeypatch.setattr(Engine, "_step", broken)
        for stream in streams:
            with pytest.raises(EngineFailure) as caught:
                await read(stream)
            assert isinstance(caught.value.__cause__, error)
            with pytest.raises(EngineFailure):
                await anext(stream)
        assert not engine.healthy
        assert isinstance(engine.failure, error)
        with pytest.raises(EngineFailure):
            await engine.submit("a")
        await engine.drain(1)
        await engine.close()

    asyncio.run(main())


def test_a_cancellation_that_failed_is_made_good(puppet, monkeypatch):
    drop, calls = Engine._drop, []

    def failing(engine, live):
        calls.append(live)
        if len(calls) == 1:
            raise MemoryError
        drop(engine, live)

    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            stream = await engine.submit("a", ENDLESS)
            await anext(stream)
            monkeypatch.setattr(Engine, "_drop", failing)
            stream.cancel()
            async for _ in stream:
                pass
            assert stream.result.finish_reason is FinishReason.CANCELLED
            assert engine.healthy

    asyncio.run(main())


def test_an_idle_engine_uses_no_time(puppet):
    async def main() -> None:
        async with AsyncEngine(puppet) as engine:
            await read(await engine.submit("a", SamplingParams(max_tokens=2)))
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert time.process_time() - before < 0.1

    asyncio.run(main())


LEFT_RUNNING = """
import asyncio, sys
from obole import Engine, SamplingParams
from obole.engine.async_engine import AsyncEngine

async def main():
    engine = AsyncEngine(Engine(sys.argv[1], kv_device=1 << 22))
    streams = [await engine.submit("a", SamplingParams(ignore_eos=True)) for _ in range(8)]
    for stream in streams:
        await anext(stream)
    main.kept = streams

asyncio.run(main())
"""


@pytest.mark.usefixtures("puppet")
def test_a_program_may_end_while_the_engine_runs(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEFT_RUNNING, tmp_path / "puppet.gguf"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
