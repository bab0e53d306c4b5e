"""A training so small that a step takes milliseconds."""

from __future__ import annotations

import torch

from fakes.checkpoints import tiny_config
from obole.distill.data import Rows
from obole.distill.model import Decoder, add_mask_token, plain
from obole.distill.parallel import World
from obole.distill.recipe import Pace, Recipe
from obole.distill.trainer import Trainer

MASK = 128
PACE = Pace(learning_rate=1e-3, warmup=2, micro_batch=8)


def tiny(arch: str = "llama", seed: int = 0, **overrides: object) -> Decoder:
    """A random model with the mask token, its weights large enough for predictions that differ."""
    decoder = plain(tiny_config(arch, **overrides), seed)
    add_mask_token(decoder, MASK, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15, generator=generator)
    return decoder


def texts(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, MASK, (count, width), generator=torch.Generator().manual_seed(seed))


def rows(count: int = 24, width: int = 40, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MASK, (count, width), generator=generator, dtype=torch.int32)
    return Rows(ids, torch.randint(8, width + 1, (count,), generator=generator), 0)


def recipe(**values: object) -> Recipe:
    return Recipe(**{"slots": 40, "regions": 4, "k_max": 6, "batch": 8, **values})  # type: ignore[arg-type]


def trainer(made: Recipe, *, teacher: Decoder | None = None, pace: Pace = PACE, world: World | None = None) -> Trainer:
    """Of a student that begins as its teacher."""
    world = World(0, 1, torch.device("cpu")) if world is None else world
    return Trainer(tiny(), tiny() if teacher is None else teacher, rows(), made, pace, MASK, world)


def weights(trained: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trained.state({}).weights.items()}
