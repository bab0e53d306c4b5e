"""Two processes on this machine (gloo) compute what one does with the whole batch, and go on from each other's states."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distill.training import recipe, trainer, weights
from obole.distill.parallel import join
from obole.distill.state import load, save
from obole.errors import ConfigError

WORKER = """
import sys
from pathlib import Path
import torch
from distill.training import recipe, trainer
from obole.distill.parallel import join
from obole.distill.state import load, save

torch.set_num_threads(1)
out, shard, begin, steps = Path(sys.argv[1]), sys.argv[2] == "shard", sys.argv[3], int(sys.argv[4])
with join(shard=shard) as world:
    taught = trainer(recipe(), world=world)
    if begin != "-":
        taught.restore(load(Path(begin)))
    losses = [taught.step().loss for _ in range(steps)]
    state = taught.state({"losses": losses})
    if world.is_first:
        save(out, state)
    assert world.any(world.rank == 1) and world.sums([1.0]) == [2.0]
    world.wait()
"""


def two(tmp_path: Path, out: Path, kind: str, begin: str, steps: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), str(out), kind, begin, str(steps)]
    running = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)


@pytest.mark.parametrize("kind", ["data", "shard"])
def test_two_processes_equal_one(tmp_path: Path, kind: str) -> None:
    """A step by this process, two by two others from its saved state, and one more by this one from theirs."""
    torch.set_num_threads(1)
    alone = trainer(recipe())
    losses = [alone.step().loss]
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    save(first, alone.state({}))
    losses += [alone.step().loss for _ in range(3)]
    two(tmp_path, second, kind, str(first), 2)
    last = trainer(recipe())
    last.restore(load(second))
    assert [*load(second).facts["losses"], last.step().loss] == pytest.approx(losses[1:], rel=1e-4)
    assert last.steps == 4
    for name, weight in weights(alone).items():
        torch.testing.assert_close(weights(last)[name], weight, atol=2e-4, rtol=1e-3)


def test_there_is_nothing_to_shard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="start several with torchrun, or leave out --shard"), join(shard=True):
        pass
    with join(shard=False) as world:
        assert world.is_first
        assert world.sums([1.5, 2.0]) == [1.5, 2.0]
        assert not world.any(False)
