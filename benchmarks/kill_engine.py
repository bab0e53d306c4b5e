"""An engine with an SSD tier, killed again and again: no answer may differ from that of an engine that has no tiers.

    python benchmarks/kill_engine.py [MODEL] [--rounds 200] [--seed 0] [--folder DIR]

Each round starts a process that answers prompts with common beginnings, through a pool too small for them and a folder that
all rounds share, and kills it with SIGKILL at a random moment. Every answer that it told of, token ids and bits of
log-probabilities, is compared. Exit status 1 at the first difference; says how many tokens of prompts came from the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from obole.engine.engine import Engine
from obole.types import SamplingParams

PROMPTS, PROMPT_TOKENS, SHARED = 12, 400, 200
POOL_TOKENS = 1024
PARAMS = SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)


def prompts(vocab_size: int) -> list[list[int]]:
    """Half of each is the beginning of three others, too."""
    rng = random.Random(1)
    heads = [[rng.randrange(vocab_size) for _ in range(SHARED)] for _ in range(PROMPTS // 4)]
    return [heads[i % len(heads)] + [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS - SHARED)] for i in range(PROMPTS)]


def answer(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    [result] = engine.generate([prompt], PARAMS)
    logprobs = [p.logprob.hex() for p in result.choices[0].logprobs or ()]
    told = json.dumps([list(result.choices[0].token_ids), logprobs])
    return {"digest": hashlib.sha256(told.encode()).hexdigest(), "ssd": result.receipt.cached_by_tier.get("ssd", 0)}


def child(model: str, folder: str, device: int, seed: int) -> None:
    """Answer at random until killed, a line for each answer. `device`: bytes of the pool."""
    engine = Engine(model, max_context=POOL_TOKENS - 1, kv_device=device, kv_ssd=f"{folder}:256MiB", speculate="off")
    rng, asked = random.Random(seed), prompts(engine.vocab_size)
    while True:
        number = rng.randrange(PROMPTS)
        print(json.dumps({"prompt": number, **answer(engine, asked[number])}), flush=True)


def round_of(model: str, folder: Path, device: int, seed: int, expected: list[str]) -> tuple[int, int]:
    """Answers of one life, and tokens of their prompts that came from the folder. Raises `AssertionError` for a wrong one."""
    command = [sys.executable, __file__, model, "--child", str(folder), str(device), "--seed", str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    answers = found = 0
    end = None
    assert process.stdout is not None
    for line in process.stdout:
        if not line.endswith("\n"):
            break  # killed while it wrote
        told = json.loads(line)
        assert told["digest"] == expected[told["prompt"]], f"prompt {told['prompt']} was answered differently"
        answers += 1
        found += told["ssd"]
        if end is None:
            end = time.monotonic() + random.Random(seed).uniform(0.0, 1.5)
        if time.monotonic() >= end:
            process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the process ended by itself"
    return answers, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.model, asked.child[0], int(asked.child[1]), asked.seed)
    with Engine(asked.model, max_context=POOL_TOKENS - 1, speculate="off", prefix_cache=False) as engine:
        device = POOL_TOKENS * engine.info.kv_bytes_per_token
        expected = [answer(engine, prompt)["digest"] for prompt in prompts(engine.vocab_size)]
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="obole-kill-"))
    console, answers, found = Console(), 0, 0
    try:
        for number in range(asked.rounds):
            more = round_of(asked.model, folder, device, asked.seed + number, expected)
            answers, found = answers + more[0], found + more[1]
            if number % 10 == 9:
                console.print(
                    f"{number + 1} of {asked.rounds}: {answers} answers, none wrong, {found:,} tokens from the folder"
                )
    except AssertionError as error:
        console.print(f"[bold red]error:[/] round {number + 1}: {error}")
        raise SystemExit(1) from None
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
