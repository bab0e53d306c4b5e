"""What a training reports of its steps: JSON lines and, where it is installed, TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

from obole.distill.trainer import Step
from obole.errors import ConfigError, OboleError

CURVES = ("loss", "cross_entropy", "accepted", "agreed", "learning_rate", "gradient_norm")


class Log:
    """A file with the fields of `Step` on a line for each step, and the same as curves in `board`, a folder, if one is given.

    What is there of steps after `done`, lost since the last state was saved, is removed. Raises `ConfigError` for a board
    without TensorBoard, and `OSError`.
    """

    def __init__(self, path: Path, done: int, board: Path | None = None) -> None:
        self._board = None if board is None else _writer()(log_dir=str(board), purge_step=done + 1)
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= done]
        beside = path.with_suffix(".part")
        beside.write_text("".join(line + "\n" for line in kept), "utf-8")
        beside.replace(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def add(self, step: Step) -> None:
        """One line, at once in the file. Raises `OboleError` if it can't be written."""
        try:
            self._file.write(json.dumps(asdict(step)) + "\n")
            self._file.flush()
        except OSError as error:
            raise OboleError(
                f"{self._file.name} could not be written: {error.strerror}. --resume goes on from the state."
            ) from None
        if self._board is not None:
            for name in CURVES:
                self._board.add_scalar(name, getattr(step, name), step.step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lines(path: Path) -> list[str]:
    """Whole lines: the last one may have been cut off."""
    return path.read_text("utf-8").split("\n")[:-1] if path.exists() else []


def _writer() -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("TensorBoard is not installed: pip install tensorboard, or leave out --tensorboard.") from None
    kind: Callable[..., Any] = SummaryWriter
    return kind
