"""What the user may set of a training, and the only source of its defaults. Without torch, for the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from obole.errors import ConfigError

MOST_SEED = 2**63 - 1  # that all generators take
LEAST_K = 2  # one token at once is what the model does already
HARD, SOFT, TRUTH = "hard", "soft", "truth"
TARGETS = (HARD, SOFT, TRUTH)
PRECISIONS = ("auto", "float32", "bfloat16")


def ground_truth(slots: int, regions: int, k: int) -> int:
    """P: the tokens of text in a region beside its k - 1 masks. Raises `ConfigError` if there is no room for any."""
    least = regions * k
    if k < LEAST_K or regions < 1 or slots < least:
        raise ConfigError(
            f"{regions} regions that predict {k} tokens take at least {max(least, LEAST_K)} slots, and there are {slots}: "
            "set more --slots, fewer --regions or a smaller --k-max."
        )
    return slots // regions - (k - 1)


def _check(values: Mapping[str, tuple[float, float]]) -> None:
    for name, (value, least) in values.items():
        if not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """`targets`: "hard" (the teacher's most likely token), "soft" (its distribution: forward KL) or "truth" (the text's own).

    `truth_steps`: in so many first steps they are the text's own all the same, because a student who does not know yet what
    masks are for says nothing that its teacher could go on from. `prefix`: weight of the next-token loss on the text itself.
    `entropy`: weight of the entropy of the student's predictions; above 0 sharpens them.
    """

    targets: str = HARD
    truth_steps: int = 0
    prefix: float = 0.0
    entropy: float = 0.0

    def __post_init__(self) -> None:
        if self.targets not in TARGETS:
            raise ConfigError(f"--loss must be one of {', '.join(TARGETS)}, not {self.targets!r}.")
        _check({"prefix_loss": (self.prefix, 0), "truth_steps": (self.truth_steps, 0)})
        if not math.isfinite(self.entropy):
            raise ConfigError(f"--entropy must be a finite number, not {self.entropy}.")

    def at(self, step: int) -> Objective:
        """That of step `step`, the first being 0."""
        return replace(self, targets=TRUTH) if step < self.truth_steps else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a training can't change on its way. Raises `ConfigError` for values out of range.

    `batch`: rows of a step, on all processes together. `lora`: rank of low-rank adapters; 0: all weights are trained.
    """

    seed: int = 0
    k_max: int = 16
    slots: int = 160
    regions: int = 5
    batch: int = 32
    objective: Objective = Objective()
    lora: int = 0

    def __post_init__(self) -> None:
        least = {"seed": 0, "k_max": LEAST_K, "slots": 1, "regions": 1, "batch": 1, "lora": 0}
        _check({name: (getattr(self, name), bound) for name, bound in least.items()})
        if self.seed > MOST_SEED:
            raise ConfigError(f"--seed must be at most {MOST_SEED}, not {self.seed}.")
        ground_truth(self.slots, self.regions, self.k_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What may be another one after an interruption: AdamW's settings, and how a step is computed.

    `micro_batch`: rows at once on one process; the gradients of several such passes are added up to those of a batch.
    `precision`: "float32", "bfloat16" (products of matrices; parameters stay float32) or "auto", bfloat16 where the
    hardware multiplies it. `checkpointing`: compute activations a second time rather than keep them.
    """

    learning_rate: float = 1e-5
    warmup: int = 100  # steps in which the learning rate rises to its constant value
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    micro_batch: int = 8
    precision: str = "auto"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        _check({"warmup": (self.warmup, 0), "weight_decay": (self.weight_decay, 0), "micro_batch": (self.micro_batch, 1)})
        for name, value in (("lr", self.learning_rate), ("clip", self.clip)):
            if not 0 < value < math.inf:
                raise ConfigError(f"--{name} must be above 0, not {value}.")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"--precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}.")

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, the first being 0: a linear rise, and then constant."""
        return self.learning_rate * min(1.0, (step + 1) / max(self.warmup, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a run ends: after so many `steps` in all, or `minutes` of this run. `save_every`: steps between saved states."""

    steps: int = 1000
    minutes: float | None = None
    save_every: int = 100

    def __post_init__(self) -> None:
        _check({"steps": (self.steps, 0), "save_every": (self.save_every, 1), "minutes": (self.minutes or 0, 0)})
