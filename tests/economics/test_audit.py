"""`obole audit`: whole logs, from files to findings."""

from __future__ import annotations

import gzip
import json
import random
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from obole.cli import audit as command
from obole.cli.commands import app
from obole.costmodel import StepCost
from obole.economics import machine
from obole.economics.audit import Values, block_keys
from obole.economics.page import size

STEP = StepCost([1, 2, 4, 8, 16, 32, 64], [0.010, 0.0105, 0.011, 0.012, 0.014, 0.02, 0.03], 1e-6, 1e-6)
SYSTEM = "You are a careful assistant of the harbour office. Quote every number as it is given and promise no date. " * 4


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """A machine whose costs are known, so that findings do not depend on who else is at work."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(machine, "measure", lambda engine: machine.Machine(engine.info, STEP, STEP, 0.001, engine.vocab_size))


@pytest.fixture
def invoke(tmp_path):
    def run(*arguments: str, **files: str | bytes):
        names = []
        for name, content in files.items():
            path = tmp_path / name
            path.write_bytes(content.encode() if isinstance(content, str) else content)
            names.append(str(path))
        return CliRunner().invoke(app, ["audit", *names, *arguments])

    return run


def jsonl(*documents: dict) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def mooncake(*requests: tuple[int, list[int]]) -> str:
    return jsonl(*({"timestamp": 0, "input_length": n, "output_length": 3, "hash_ids": ids} for n, ids in requests))


def chats(count: int, seed: int = 0) -> str:
    """Half of the answers repeat their document, half say something else; a time stands in front of the instructions."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randrange(3, 8))) for _ in range(2000)]
    made = []
    for i in range(count):
        document = " ".join(rng.choices(words, k=60))
        answer = document if i % 2 else " ".join(rng.choices(words, k=40))
        stamp = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}, ticket {rng.randrange(10**6)}. "
        messages = [{"role": "system", "content": stamp + SYSTEM}, {"role": "user", "content": document}]
        made.append({"messages": messages, "response": answer, "user": f"user-{i}"})
    return jsonl(*made)


def test_a_trace_without_words(invoke):
    log = mooncake((1100, [0, 1, 2]), (1100, [0, 1, 3]), (600, [0, 9]), (1100, [0, 1, 2]))
    found = json.loads(invoke("--json", "-", "--kv-bytes", "1000", "--tiers", "device=2MB,ram=1GB", log=log).stdout)
    assert (found["requests"], found["prompt_tokens"], found["answer_tokens"]) == (4, 3900, 12)
    prefix = found["prefix"]
    hits = 2 * 512 + 512 + (512 + 512 + 76)
    assert prefix["unbounded"] == pytest.approx(hits / 3900)
    device, ram = prefix["tiers"]
    assert (device["tokens"], ram["tokens"]) == (
        2000,
        10**6,
    )  # three blocks: the last request has to find one from four uses ago
    assert device["hits"] + ram["hits"] == pytest.approx(hits / 3900)
    assert found["machine"] is found["copying"] is None
    table = invoke(log=log).stdout
    assert "prefix caches find at most" in table


def test_azure_and_compressed_sessions(invoke):
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,10,2\n2023-11-16 18:17:04.0319600,30,4\n"
    found = json.loads(invoke("--json", "-", log=azure).stdout)
    assert found["prefix"] is None
    assert found["lengths"]["prompt"]["mean"] == 20
    session = {
        "id": "s",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [{"t": i, "in": 130, "out": 7, "hash_ids": [1, 2]} for i in range(3)],
    }
    found = json.loads(invoke("--json", "-", log=gzip.compress(jsonl(session).encode())).stdout)
    assert found["prefix"]["unbounded"] == pytest.approx(2 * 128 / 390)


def test_a_log_with_words(invoke, tmp_path):
    report, document = tmp_path / "report.html", tmp_path / "found.json"
    result = invoke("--html", str(report), "--json", str(document), log=chats(24))
    assert result.exit_code == 0, result.output
    found = json.loads(document.read_text())
    assert found["requests"] == found["answered"] == found["copying"]["answers"] == 24
    assert found["copying"]["own"]["copyable"] > 0.5
    assert found["nothing_to_copy"]["share"] == 0.5
    modes = found["speed_up"]["modes"]
    assert modes["lookup"]["speed_up"] == pytest.approx(modes["auto"]["speed_up"], rel=0.05)  # each request is another tenant's
    assert modes["lookup"]["speed_up"] > 1.3
    assert modes["memory"]["speed_up"] == pytest.approx(1, abs=0.01)
    best = found["passages"][0]
    assert best["prompts"] == 1.0
    assert "careful assistant" in best["text"]
    assert best["hit_gain"] > 0.2
    for words in ("expected of drafts", "careful assistant", "nothing to copy: between tokens"):
        assert words in result.stdout
    page = report.read_text()
    checked = Checked()
    checked.feed(page)
    assert checked.open == ["html"] or not checked.open
    assert "<svg" in page
    assert not re.search(r"(src|href)=|https?://|<script|@import|url\(", page)


class Checked(HTMLParser):
    """Every element is closed in its order."""

    VOID = frozenset({"meta", "line", "rect", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, _attributes: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, _attributes: object) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_prompts_cannot_become_markup(invoke, tmp_path):
    nasty = '<script>alert("x")</script> & <b>bold</b> ' * 30
    log = jsonl(
        *(
            {
                "messages": [{"role": "system", "content": f"{i * 7919} {nasty}"}, {"role": "user", "content": "x"}],
                "response": "y",
            }
            for i in range(6)
        )
    )
    report = tmp_path / "r.html"
    assert invoke("--html", str(report), **{"a<b>.jsonl": log}).exit_code == 0
    page = report.read_text()
    assert "<script>" not in page
    assert "<b>bold" not in page
    assert "&lt;script&gt;" in page


def test_moving_a_passage_to_the_front_gains_what_was_said(invoke):
    log = chats(24)
    moved = []
    for line in log.splitlines():
        entry = json.loads(line)
        stamp, _, _ = entry["messages"][0]["content"].partition(SYSTEM)
        entry["messages"][0]["content"] = SYSTEM + stamp
        moved.append(entry | {"user": "all"})
    before = json.loads(invoke("--json", "-", log=log.replace("user-", "all-")).stdout)
    after = json.loads(invoke("--json", "-", log=jsonl(*moved)).stdout)
    gained = after["prefix"]["unbounded"] - before["prefix"]["unbounded"]
    assert before["passages"][0]["hit_gain"] == pytest.approx(gained, abs=0.04)


def test_batches_are_joined_in_any_order(invoke):
    asked = [
        {"custom_id": str(i), "method": "POST", "url": "/", "body": {"messages": [{"role": "user", "content": f"hello {i}"}]}}
        for i in range(3)
    ]
    said = [
        {"custom_id": str(i), "response": {"status_code": 200, "body": {"choices": [{"message": {"content": f"well {i}"}}]}}}
        for i in (2, 0, 7)
    ]
    found = json.loads(invoke("--json", "-", requests=jsonl(*asked), results=jsonl(*said)).stdout)
    assert (found["requests"], found["answered"], found["answers_without_request"]) == (3, 2, 1)
    alone = invoke(results=jsonl(*said))
    assert alone.exit_code == 1
    assert "without their requests" in alone.stderr


def test_conversations_that_the_template_does_not_take(invoke):
    log = jsonl({"messages": [{"role": "robot", "content": "beep"}], "response": "boop"})
    found = json.loads(invoke("--json", "-", log=log).stdout)
    assert found["requests"] == 1
    assert found["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("", "The log is empty"),
        ("\n\n", "The log is empty"),
        ("hello\n", "Line 1 of"),
        (chats(2) + '{"messages": [', "Line 3 of"),
        (b"\x1f\x8b\x08\x00damaged", "damaged"),
        (b"PK\x03\x04", "zip archive"),
        (mooncake((5, [0])) + chats(1), "Line 2 of"),
    ],
)
def test_logs_that_cannot_be_audited(invoke, log, message):
    result = invoke(log=log)
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


def test_skipping_and_refusing(invoke, tmp_path):
    result = invoke("--skip-bad", "--json", "-", log=chats(2) + '{"messages": [\n' + chats(1))
    assert json.loads(result.stdout)["skipped"] == 1
    assert "skipped: 1 lines" in result.stderr
    mixed = invoke(trace=mooncake((5, [0])), words=chats(1))
    assert "one kind at a time" in mixed.stderr.replace("\n", " ")
    assert "is no file" in invoke(str(tmp_path / "none")).stderr
    for wrong in (("--tiers", "tape=1GB"), ("--tiers", "ram=x"), ("--sample", "2"), ("--draft", "x")):
        assert invoke(*wrong, log=chats(1)).exit_code == 2
    refused = invoke("--html", str(tmp_path / "no" / "x.html"), log=chats(1))
    assert "cannot be written" in refused.stderr


def test_a_huge_log_needs_no_more_memory(invoke):
    """Far more blocks than may be remembered: a sample is, and the curve stays near."""
    rng = random.Random(1)
    requests = [(512 * 8, [block * 8 + i for i in range(8)]) for block in (rng.randrange(2000) for _ in range(4000))]
    exact = json.loads(invoke("--json", "-", log=mooncake(*requests)).stdout)["prefix"]
    sampled = json.loads(invoke("--json", "-", "--most-blocks", "2000", log=mooncake(*requests)).stdout)["prefix"]
    assert exact["sampled"] == 1
    assert sampled["sampled"] <= 0.25
    assert sampled["unbounded"] == pytest.approx(exact["unbounded"], abs=0.05)


def test_prompts_are_really_answered(invoke):
    found = json.loads(invoke("--json", "-", "--replay", "2", "--speculate", "auto", log=chats(3)).stdout)
    assert [row["mode"] for row in found["replay"]] == ["off", "lookup", "auto"]
    assert all(row["identical"] and row["requests"] == 2 and row["tokens_per_second"] > 0 for row in found["replay"])
    assert found["replay"][0]["tokens_per_pass"] == 1


def test_parts():
    assert command.parse_tiers("ram=2GiB,device=1GB") == {"device": 10**9, "ram": 2 << 30}
    assert len(block_keys("a", range(33))) == 2
    assert block_keys("a", range(33))[0] == block_keys("a", range(16))[0]
    assert block_keys("a", range(16)) != block_keys("b", range(16))
    values = Values()
    for i in range(100_000):
        values.add(i)
    assert values.percentile(50) == pytest.approx(50_000, rel=0.05)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "–"),
        (12, "12 B"),
        (999.6, "1 kB"),
        (12_100_000_000, "12.1 GB"),
        (8e9, "8 GB"),
        (1e12, "1,000 GB"),
        (2.5e13, "25,000 GB"),
    ],
)
def test_sizes_are_written_out(count, shown):
    assert size(count) == shown
