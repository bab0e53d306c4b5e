"""One training on several processes, started by torchrun: data parallel (DDP) or with all parameters sharded (FSDP2).

Processes compute different rows of a batch. Each divides by the counts of the whole batch, so that gradients add up to those
of one process; the libraries average, hence the factor `size` on a loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from obole.errors import ConfigError

PATIENCE = timedelta(days=1)  # the first process may write text for hours while the others wait


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a training. `rank`: which one this is, the first being 0, which alone writes files and speaks."""

    rank: int
    size: int
    device: torch.device
    shard: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sum over all processes of each value. Every process must call it."""
        if self.size == 1:
            return list(values)
        held = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(held)
        return [float(value) for value in held.tolist()]

    def any(self, holds: bool) -> bool:
        """Whether it holds on any process. Every process must call it."""
        return self.sums([float(holds)])[0] > 0

    def wait(self) -> None:
        """Until all processes are here."""
        self.sums([0.0])


@contextmanager
def join(*, shard: bool) -> Iterator[World]:
    """The world that torchrun describes in the environment, or one of this process alone; left at the end.

    Raises `ConfigError` if there is nothing to shard over.
    """
    size, rank, local = (int(os.environ.get(name, "") or value) for name, value in _ENVIRONMENT)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if size == 1:
        if shard:
            raise ConfigError(
                "There is one process, and nothing to shard over: start several with torchrun, or leave out --shard."
            )
        yield World(0, 1, device)
        return
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=PATIENCE)
    try:
        yield World(rank, size, device, shard)
    finally:
        dist.destroy_process_group()


_ENVIRONMENT = (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))


def placed(world: World, model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
    """The model on this process's device, or its part there. `layers`: what is sharded, and gathered, as one."""
    if world.shard:
        mesh = init_device_mesh(world.device.type, (world.size,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    model.to(world.device)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    return DistributedDataParallel(model, broadcast_buffers=False) if world.size > 1 and trains else model


def accumulating(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """For one of several backward passes before a step: gradients are exchanged in the last of them only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if isinstance(model, DistributedDataParallel) and not last:
        quiet: AbstractContextManager[None] = model.no_sync()
        return quiet
    return nullcontext()
