"""`obole distill` on a tiny model: from texts to a folder that can be opened, with interruptions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from fakes.checkpoints import random_weights, tiny_config, write_byte_tokenizer, write_hf
from obole.cli.distill_screen import Means, duration, seconds_left
from obole.config import MultiToken
from obole.distill.recipe import Limits
from obole.distill.state import load
from obole.distill.trainer import Step
from obole.weights.checkpoint import open_checkpoint

MAIN = "import sys; from obole.cli.app import main; sys.argv[0] = 'obole'; main()"
SMALL = ["--slots", "40", "--regions", "4", "--k-max", "6", "--batch", "4", "--lr", "1e-3", "--warmup", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def script() -> None:
    """The engine is a real one here."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("llama", vocab_size=260, bos_id=257, eos_ids=(259,))
    folder = write_hf(tmp_path_factory.mktemp("cli") / "model", config, random_weights(config))
    return write_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.txt"
    path.write_text("\n\n".join(f"{n} and {n + 1} make {2 * n + 1}, and that is odd." for n in range(40)) + "\n\nshort")
    return path


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    return ["distill", str(model), str(out), *SMALL, *more]


def test_a_model_that_was_taught_opens_as_an_ordinary_one(invoke: Any, model: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = invoke(*arguments(model, out, "--data", str(texts), "--steps", "4", "--dtype", "float32", "--json"))
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["steps"], told["ended"], told["model"], told["rows"], told["short"]) == (4, "done", str(out), 40, 1)
    assert told["slots"] > 0
    assert told["last"]["accepted"] >= 1
    checkpoint = open_checkpoint(out)
    assert checkpoint.config.multi_token == MultiToken(260, 6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    opened = (open_checkpoint(model), checkpoint)
    before, after = (one.tensors["model.layers.0.mlp.down_proj.weight"].data.tobytes() for one in opened)
    assert theirs["model.layers.0.mlp.down_proj.weight"].numpy().tobytes() == after != before
    assert transformers.AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("<|mtp|>") == 260
    log = [json.loads(line) for line in (tmp_path / "out.training" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4]


def test_more_steps_later_are_those_of_one_run(invoke: Any, model: Path, texts: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    more = ["--data", str(texts), "--steps"]
    assert invoke(*arguments(model, once, *more, "5")).exit_code == 0
    assert invoke(*arguments(model, twice, *more, "2")).exit_code == 0
    first = (twice / "model.safetensors").read_bytes()
    assert invoke(*arguments(model, twice, *more, "5", "--resume")).exit_code == 0
    assert (twice / "model.safetensors").read_bytes() == (once / "model.safetensors").read_bytes() != first


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_saves_and_says_how_to_go_on(model: Path, texts: Path, tmp_path: Path, number: signal.Signals) -> None:
    out, place = tmp_path / "out", tmp_path / "out.training"
    line = arguments(model, out, "--data", str(texts), "--steps", "1000000", "--always-export")
    running = subprocess.Popen([sys.executable, "-c", MAIN, *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not ((place / "log.jsonl").exists() and (place / "log.jsonl").read_text().count("\n") > 2):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(number)
    stdout, stderr = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "(stopped)" in stdout
    assert f"To go on: obole distill {model}" in stderr
    assert stderr.rstrip().endswith("--resume")
    steps = load(place / "state.pt").step
    assert (place / "log.jsonl").read_text().count("\n") == steps
    assert open_checkpoint(out).config.multi_token is not None


def test_it_trains_on_what_the_model_writes(invoke: Any, model: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("One and\n\nTwo and")
    line = arguments(model, out, "--self-generate", "600", "--prompts", str(prompts), "--steps", "2")
    done = invoke(*line)
    assert done.exit_code == 0, done.output
    written = (tmp_path / "out.training" / "texts.jsonl").read_text()
    assert json.loads(written.splitlines()[1])["ids"][:7] == list(b"One and")
    assert invoke(*line[:-1], "3", "--resume").exit_code == 0
    assert (tmp_path / "out.training" / "texts.jsonl").read_text() == written


def test_adapters_leave_the_weights_alone(invoke: Any, model: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert invoke(*arguments(model, out, "--data", str(texts), "--steps", "2", "--lora", "4")).exit_code == 0
    assert (out / "multi_token_adapter.safetensors").exists()
    ours, theirs = open_checkpoint(out).tensors, open_checkpoint(model).tensors
    name = "model.layers.1.self_attn.q_proj.weight"
    assert (ours[name].data == theirs[name].data).all()
    again = invoke(*arguments(out, tmp_path / "again", "--data", str(texts), "--steps", "1"))
    assert (again.exit_code, "has an adapter for its masks, which would be lost" in again.stderr) == (1, True)


def test_nothing_is_overwritten_and_nothing_is_resumed_by_mistake(
    invoke: Any, model: Path, texts: Path, tmp_path: Path
) -> None:
    out, more = tmp_path / "out", ["--data", str(texts), "--steps", "1"]
    done = invoke(*arguments(model, out, *more, "--resume"))
    assert (done.exit_code, "There is nothing to resume" in done.stderr) == (1, True)
    assert invoke(*arguments(model, out, *more)).exit_code == 0
    done = invoke(*arguments(model, out, *more))
    assert (done.exit_code, "add --resume to go on, or remove it" in done.stderr) == (1, True)
    done = invoke(*arguments(model, out, *more, "--resume", "--seed", "1"))
    assert (done.exit_code, "another seed (0, not 1)" in done.stderr) == (1, True)
    done = invoke(*arguments(model, out, *more, "--resume", "--slots", "44"))  # whose rows are others, too
    assert (done.exit_code, "another slots (40, not 44)" in done.stderr) == (1, True)
    for place, status, message in ((".", 2, "OUT must name a folder"), (texts / "x", 1, "cannot be made: Not a directory")):
        done = invoke(*arguments(model, Path(place), *more))
        assert (done.exit_code, message in done.stderr) == (status, True), done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    done = invoke(*arguments(model, tmp_path / "full", *more))
    assert (done.exit_code, "exists already: choose another folder" in done.stderr) == (1, True)
    assert not (tmp_path / "full.training").exists()


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ([], 2, "either --data FILE or --self-generate N"),
        (["--data", "TEXTS", "--self-generate", "5"], 2, "either --data FILE or --self-generate N"),
        (["--data", "TEXTS", "--loss", "guess"], 2, "--loss must be one of hard, soft, truth"),
        (["--data", "TEXTS", "--k-max", "20"], 2, "set more --slots, fewer --regions or a smaller --k-max"),
        (["--data", "TEXTS", "--lr", "0"], 2, "--lr must be above 0"),
        (["--data", "TEXTS", "--dtype", "int4"], 2, "--dtype must be one of"),
        (["--data", "TEXTS", "--slots", "4000"], 1, "all 41 texts are shorter than a region (1000 tokens)"),
        (["--data", "TEXTS", "--slots", "300", "--regions", "10"], 1, "--slots must be at most 256, the model's context"),
        (["--data", "nothing.txt"], 1, "nothing.txt cannot be read"),
        (["--data", "TEXTS", "--shard"], 1, "start several with torchrun"),
        (["--self-generate", "9", "--text-length", "300"], 1, "max-context"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    invoke: Any, model: Path, texts: Path, tmp_path: Path, more: list[str], status: int, message: str
) -> None:
    done = invoke(*arguments(model, tmp_path / "out", *[str(texts) if word == "TEXTS" else word for word in more]))
    assert (done.exit_code, done.stderr.count("\n")) == (status, 1), done.stderr
    assert message in done.stderr
    again = invoke(*arguments(model, tmp_path / "out", "--data", str(texts), "--steps", "0"))
    assert again.exit_code == 0, again.stderr  # nothing is left behind that stands in the way


def test_a_model_without_a_tokenizer_has_no_text(invoke: Any, texts: Path, tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder = write_hf(tmp_path / "bare", config, random_weights(config))
    done = invoke(*arguments(folder, tmp_path / "out", "--data", str(texts)))
    assert (done.exit_code, "has no tokenizer, and so no text to train on" in done.stderr) == (1, True)


def step(number: int, loss: float) -> Step:
    return Step(
        step=number, k=4, roll=0, loss=loss, cross_entropy=loss, accepted=2.0, agreed=3.0, predictions=10, slots=100,
        learning_rate=1.0, gradient_norm=1.0, seconds=0.5,
    )  # fmt: skip


def test_shown_means_forget_slowly() -> None:
    means = Means()
    for number in range(1, 5):
        means.add(step(number, float(number)))
    assert means.values["loss"] == pytest.approx(2.5)  # the first few count alike
    for number in range(200):
        means.add(step(number, 7.0))
    assert means.line == "loss 7.000 · 2.0 of 4.0 tokens at confidence 0.9, 3.0 agreed · 200 tokens/s"


def test_time_left_is_that_of_the_steps_or_of_the_clock() -> None:
    assert seconds_left(Limits(steps=100), 40, 2.0, 30.0) == 120
    assert seconds_left(Limits(steps=100, minutes=1.0), 40, 2.0, 30.0) == 30
    assert seconds_left(Limits(steps=100, minutes=1.0), 40, 2.0, 90.0) == 0
    assert duration(3753.2) == "1:02:33"
