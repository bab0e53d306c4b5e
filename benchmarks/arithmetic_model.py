"""A small model that solves word problems, trained from nothing, and then taught to say several tokens at once.

python benchmarks/arithmetic_model.py OUT

writes to the folder OUT: `base`, trained on `texts.jsonl`; `several`, made of it by `obole distill` on its own words;
`ground-truth`, made in the same way but for the words, which are always the text's. What it yields:

obole bench mtp OUT/several --json several.json; obole bench mtp OUT/ground-truth --concurrency 1 --json ground-truth.json
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy

import obole
from obole.bench import problems
from obole.config import ModelConfig, RopeConfig
from obole.distill.export import TOKENIZER, TOKENIZER_CONFIG, export
from obole.distill.model import Decoder, plain

END = "<|endoftext|>"
SEED = 0
TEXTS = 40_000  # different problems, each of which is read once
READ_FOR_WORDS = 5_000  # texts that the tokenizer is made from
BATCH = 16
STEPS = 2_500
WARMUP, LEAST_RATE = 50, 0.03  # the last as a share of the highest
MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.03, 0.95, 0.01
ADAMW_RATE, ADAMW_BETAS = 4e-3, (0.9, 0.95)
IGNORED = -100

# How it is taught: rows of 400 slots hold every text with its masks; the texts' own next tokens keep up what the model knows.
METHOD = (
    "--slots 400 --regions 16 --batch 16 --micro-batch 16 --prefix-loss 1 --truth-steps 600 --warmup 50 "
    "--threads 1 --precision float32 --dtype float32"
)
STAGES = ((2_400, "2e-3"), (2_800, "5e-4"), (3_000, "1e-4"))  # steps in all, and the learning rate up to then
TAUGHT = {"several": "hard", "ground-truth": "truth"}


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made nearly orthogonal by five steps of Newton and Schulz (K. Jordan 2024), in float32.

    It is used here since attention learns to copy from the question in half the steps that AdamW takes.
    """

    def __init__(self, matrices: list[torch.nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": MUON_RATE})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MUON_MOMENTUM)
                update = orthogonal(matrix.grad.lerp(momentum, MUON_MOMENTUM))
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1 - group["lr"] * MUON_DECAY).add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with singular values near one."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.T if tall else x


def byte_level(texts: list[str]) -> tokenizers.Tokenizer:
    """A token for each word and each digit of the texts, and 256 for bytes, so that it reads any other text as well."""
    made = tokenizers.Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=4096, min_frequency=20, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def configuration(vocabulary: int, end: int) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=192,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position=512,
        rms_eps=1e-6,
        qk_norm=True,
        rope=RopeConfig(theta=10_000.0),
        tie_embeddings=True,
        eos_ids=(end,),
    )


def batches(rows: list[list[int]], rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Without end: inputs and targets, int64 (BATCH, length), of texts of about the same length."""
    while True:
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]) // 4, rng.random()))
        groups = [order[i : i + BATCH] for i in range(0, len(order) - BATCH + 1, BATCH)]
        rng.shuffle(groups)
        for group in groups:
            longest = max(len(rows[i]) for i in group)
            padded = torch.tensor([rows[i] + [IGNORED] * (longest - len(rows[i])) for i in group])
            yield padded[:, :-1].clamp(min=0), padded[:, 1:]


def share_of_rate(step: int) -> float:
    """A linear rise, then half a cosine."""
    fall = LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * step / STEPS)) / 2
    return min(1.0, (step + 1) / WARMUP) * fall


def train(decoder: Decoder, rows: list[list[int]]) -> None:
    """In place, in float32: matrices of the layers with Muon, embedding and norms with AdamW."""
    parameters = dict(decoder.named_parameters())
    inner = [p for name, p in parameters.items() if p.ndim > 1 and "embedding" not in name]
    others = [p for name, p in parameters.items() if p.ndim == 1 or "embedding" in name]
    optimizers = [Muon(inner), torch.optim.AdamW(others, lr=ADAMW_RATE, betas=ADAMW_BETAS, weight_decay=0.0)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate) for optimizer in optimizers]
    started, losses = time.perf_counter(), []
    for step, (ids, targets) in enumerate(batches(rows, random.Random(SEED)), 1):
        length = ids.shape[1]
        logits = decoder(ids, torch.arange(length), torch.ones(length, length, dtype=torch.bool).tril())
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(float(loss.detach()))
        if step % 100 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step} of {STEPS}, loss {sum(losses[-100:]) / 100:.4f}, {seconds:.0f} s", flush=True)
        if step == STEPS:
            return


def accuracy(folder: Path, count: int) -> float:
    """The share of held-out problems that the engine solves with the model, greedily."""
    asked = problems.arithmetic(count, problems.TEST_SEED, problems.TEST)
    with obole.Engine(str(folder)) as engine:
        prompts = [problems.plain_prompt(problem) for problem in asked]
        answers = engine.generate(prompts, obole.SamplingParams(max_tokens=256, speculate="off", mtp="off"))
    return sum(problems.solved(problem, answer.text) for problem, answer in zip(asked, answers, strict=True)) / count


def train_base(texts: list[str], folder: Path) -> None:
    tokenizer = byte_level(texts[:READ_FOR_WORDS])
    end = tokenizer.token_to_id(END)
    rows = [[*found.ids, end] for found in tokenizer.encode_batch(texts)]
    decoder = plain(configuration(tokenizer.get_vocab_size(), end), SEED)
    count = sum(parameter.numel() for parameter in decoder.parameters())
    print(f"{count:,} parameters, {tokenizer.get_vocab_size()} tokens, {sum(map(len, rows)) / len(rows):.0f} of them a text")
    train(decoder, rows)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "add_bos_token": False}
    export(decoder, {TOKENIZER: tokenizer.to_str(), TOKENIZER_CONFIG: json.dumps(settings)}, folder)


def teach(out: Path, name: str) -> None:
    """By the command line, with a learning rate that falls twice. What it prints goes to a file."""
    command = [Path(sys.executable).with_name("obole"), "distill", out / "base", out / name, "--data", out / "texts.jsonl"]
    command += ["--loss", TAUGHT[name], *METHOD.split()]
    with (out / f"{name}.log").open("w") as log:
        for number, (steps, learning_rate) in enumerate(STAGES):
            stage = ["--lr", learning_rate, "--steps", str(steps), *(["--resume"] if number else [])]
            subprocess.run([*command, *stage], check=True, stdout=log, stderr=log)
    print(f"{name}: taught; see {log.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=400, help="held out, to see how many each model solves")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    texts = [problems.training_text(problem) for problem in problems.arithmetic(TEXTS, SEED, problems.TRAIN)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (options.out / "texts.jsonl").write_text(lines, encoding="utf-8")
    train_base(texts, options.out / "base")
    with ThreadPoolExecutor() as pool:  # at once, since so small a model gains little from a second processor
        list(pool.map(partial(teach, options.out), TAUGHT))
    for name in ("base", *TAUGHT):
        share = accuracy(options.out / name, options.problems)
        print(f"{name}: {100 * share:.1f} % of {options.problems} held-out problems solved, one token at a time")


if __name__ == "__main__":
    main()
