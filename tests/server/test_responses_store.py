"""What /v1/responses keeps: for whom, how much, for how long; and responses that are ended before their time."""

from __future__ import annotations

import json
import threading

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.engine.runner import Runner
from obole.server.responses_store import OVERHEAD, ResponseStore, Stored, Turn

from .asking import answered, refusal, until
from .test_responses import PATH, respond, stream, text_of
from .typed import typed_events

# -- over HTTP ------------------------------------------------------------------------------------------------------------


def test_a_response_can_be_asked_for_until_it_is_deleted(client):
    for document in (respond(client), stream(client)[-1]["response"]):
        where = f"{PATH}/{document['id']}"
        assert answered(client.get(where)) == answered(client.get(where, params={"stream": "false"})) == document
        assert refusal(client.get(where, params={"stream": "true"}))["param"] == "stream"
        assert refusal(client.get(where, params={"include": "x"}))["param"] == "include"
        assert refusal(client.post(f"{where}/cancel"))["message"].count("completed") == 1
        assert answered(client.delete(where)) == {"id": document["id"], "object": "response", "deleted": True}
        for gone in (client.get(where), client.delete(where), client.post(f"{where}/cancel")):
            assert refusal(gone, 404)["code"] == "response_not_found"
        body = {"input": "hi", "previous_response_id": document["id"]}
        assert refusal(client.post(PATH, json=body), 404)["param"] == "previous_response_id"


def test_what_is_not_to_be_kept_is_not_kept(client):
    document = respond(client, store=False)
    assert document["store"] is False
    assert refusal(client.get(f"{PATH}/{document['id']}"), 404)


def test_a_server_that_keeps_nothing_says_so(serve_speaking):
    client = serve_speaking(["one"], stored_responses=0).client
    document = respond(client)
    assert document["store"] is False
    assert refusal(client.get(f"{PATH}/{document['id']}"), 404)
    assert refusal(client.post(PATH, json={"input": "hi", "store": True}))["param"] == "store"


def test_a_response_is_nobody_elses(serve_speaking):
    served = serve_speaking(["one"], api_keys=("ann", "bob"))
    ann, bob = (httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {key}"}) for key in ("ann", "bob"))
    where = f"{PATH}/{respond(ann)['id']}"
    for request in (bob.get(where), bob.post(f"{where}/cancel"), bob.delete(where)):
        assert refusal(request, 404)["code"] == "response_not_found"
    body = {"input": "hi", "previous_response_id": where.rpartition("/")[2]}
    assert refusal(bob.post(PATH, json=body), 404)["code"] == "previous_response_not_found"
    assert refusal(httpx.get(f"{served.url}{where}"), 401)
    assert answered(ann.get(where))["status"] == "completed"


@pytest.fixture
def gate(monkeypatch):
    """Holds the engine's steps while it is cleared."""
    opened = threading.Event()
    opened.set()
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda *args: opened.wait(30) and run(*args))
    yield opened
    opened.set()


class Reader:
    """Reads the first events of a stream, then the rest on a thread."""

    def __init__(self, client: httpx.Client, **body) -> None:
        self._context = client.stream("POST", PATH, json={"input": "hi", "stream": True, **body})
        self._pieces = (response := self._context.__enter__()).iter_bytes()
        assert response.status_code == 200
        self._read = next(self._pieces)
        while b"in_progress\ndata" not in self._read:
            self._read += next(self._pieces)
        self.id = json.loads(self._read.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]

    def rest(self):
        self._read += b"".join(self._pieces)
        self.leave()
        return typed_events(self._read)

    def leave(self) -> None:
        self._context.__exit__(None, None, None)


def test_a_response_in_progress_is_cancelled(plain, gate):
    gate.clear()
    reader = Reader(plain.client)
    with httpx.Client(base_url=plain.url) as other:
        where = f"{PATH}/{reader.id}"
        assert answered(other.get(where))["status"] == "in_progress"
        assert (
            refusal(other.post(PATH, json={"input": "x", "previous_response_id": reader.id}))["param"] == "previous_response_id"
        )
        assert answered(other.post(f"{where}/cancel"))["status"] == "cancelled"
        gate.set()
        events = reader.rest()
        assert events[-1]["type"] == "response.cancelled"
        assert answered(other.get(where)) == answered(other.post(f"{where}/cancel")) == events[-1]["response"]
        assert (
            "cannot be continued"
            in refusal(other.post(PATH, json={"input": "x", "previous_response_id": reader.id}))["message"]
        )


def test_a_response_that_is_deleted_in_progress_ends(plain, gate):
    gate.clear()
    reader = Reader(plain.client)
    with httpx.Client(base_url=plain.url) as other:
        answered(other.delete(f"{PATH}/{reader.id}"))
        gate.set()
        assert reader.rest()[-1]["type"] == "response.cancelled"
        refusal(other.get(f"{PATH}/{reader.id}"), 404)


def test_a_response_whose_reader_left_is_cancelled(plain, gate):
    gate.clear()
    reader = Reader(plain.client)
    reader.leave()
    where = f"{PATH}/{reader.id}"
    until(lambda: answered(plain.client.get(where))["status"] == "cancelled")


def test_a_failure_in_a_stream_is_an_event(plain, monkeypatch):
    def fail(*_):
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", fail)
        events = stream(plain.client)
        whole = plain.client.post(PATH, json={"input": "hi"})
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert answered(plain.client.get(f"{PATH}/{events[-1]['response']['id']}")) == events[-1]["response"]
    assert refusal(whole, 500)["type"] == "server_error"
    assert text_of(respond(plain.client))


# -- the store itself -----------------------------------------------------------------------------------------------------


class Fake:
    """A response that comes to its end when the test says so."""

    def __init__(self, name: str) -> None:
        self.status = "in_progress"
        self.name = name

    def json(self) -> bytes:
        return f"{self.status} {self.name}".encode()

    def cancel(self) -> None:
        self.status = "cancelled"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keep(store: ResponseStore, tenant: int, name: str, before: Turn | None = None, size: int = 10) -> Stored:
    stored = Stored(tenant, name, live := Fake(name))
    store.begin(stored)
    live.status = "completed"
    store.end(stored, Turn(before, [{"role": "user", "content": "x" * size}]))
    return stored


def test_what_was_not_used_for_long_is_forgotten():
    clock = Clock()
    store = ResponseStore(10, 1 << 20, 60.0, clock)
    keep(store, 0, "a")
    keep(store, 0, "b")
    clock.now = 40.0
    assert store.find(0, "a").json() == b"completed a"
    clock.now = 70.0
    assert store.find(0, "b") is None
    clock.now = 99.0
    assert store.find(0, "a") is not None
    clock.now = 160.0
    assert store.find(0, "a") is None
    assert (len(store), store.size) == (0, 0)


def test_who_stores_much_pushes_out_only_its_own():
    store = ResponseStore(4, 1 << 20, 60.0, Clock())
    keep(store, 1, "mine")
    for number in range(10):
        keep(store, 2, str(number))
    assert store.find(1, "mine") is not None
    assert [name for name in map(str, range(10)) if store.find(2, name)] == ["7", "8", "9"]
    store = ResponseStore(1000, 20_000, 60.0, Clock())
    keep(store, 1, "mine")
    for number in range(10):
        keep(store, 2, str(number), size=5000)
    assert store.find(1, "mine") is not None
    assert [name for name in map(str, range(10)) if store.find(2, name)] == ["7", "8", "9"]
    keep(store, 2, "all too large", size=30_000)
    assert store.find(2, "all too large") is None
    assert store.find(1, "mine") is not None


def test_a_conversation_outlives_the_responses_that_it_came_from():
    store = ResponseStore(1, 1 << 20, 60.0, Clock())
    turn = None
    for number in range(2000):
        turn = keep(store, 0, str(number), turn).turn
    assert len(store) == 1
    assert len(turn.conversation()) == 2000
    assert store.size > 2000 * 10
    store.delete(store.find(0, "1999"))
    assert store.size == 0


def recount(store: ResponseStore) -> int:
    """The bytes of a store from what can be reached."""
    responses = [stored for share in store._shares.values() for stored in share.responses.values()]
    turns = {}
    for stored in responses:
        turn = stored.turn
        while turn is not None:
            turns[id(turn)] = turn
            turn = turn.before
    for turn in turns.values():
        holders = sum(stored.turn is turn for stored in responses) + sum(other.before is turn for other in turns.values())
        assert turn.holders == holders
        assert turn.size == len(msgspec.json.encode(turn.messages))
    assert all(stored.size == OVERHEAD + len(stored.document) for stored in responses)
    return sum(stored.size for stored in responses) + sum(turn.size for turn in turns.values())


STEP = st.tuples(st.sampled_from(["begin", "end", "find", "delete", "wait"]), st.integers(0, 2), st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=60), st.integers(1, 6), st.integers(1500, 12_000))
def test_the_books_of_the_store_are_right(steps, most, most_bytes):
    clock = Clock()
    store = ResponseStore(most, most_bytes, 50.0, clock)
    began: list[Stored] = []
    known: list[list[Turn | None]] = [[None], [None], [None]]  # turns of each tenant, also of responses that are gone
    for number, (step, tenant, which) in enumerate(steps):
        if step == "begin":
            began.append(Stored(tenant, str(number), Fake(str(number))))
            store.begin(began[-1])
        elif step == "wait":
            clock.now += which * 3
        elif step == "end" and any(stored.live for stored in began):
            going = [stored for stored in began if stored.live]
            stored = going[which % len(going)]
            before = known[stored.tenant][tenant % len(known[stored.tenant])]
            turn = Turn(before, [{"role": "user", "content": "x" * which * 100}]) if which % 4 else None
            store.end(stored, turn)
            known[stored.tenant].insert(0, turn)
        elif step in ("find", "delete") and began:
            stored = began[which % len(began)]
            found = store.find(stored.tenant, stored.id)
            assert found in (None, stored)
            assert store.find((stored.tenant + 1) % 3, stored.id) is None
            if step == "delete" and found is not None:
                store.delete(found)
                assert store.find(stored.tenant, stored.id) is None
        assert store.size == recount(store) <= most_bytes
        assert len(store) <= most
