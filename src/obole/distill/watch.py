"""Whether a training still goes well."""

from __future__ import annotations

import math
from dataclasses import dataclass

from obole.errors import OboleError

MEMORY = 0.98  # of the smoothed loss: it looks back about 50 steps
SETTLED = 50  # steps before it is judged
FACTOR, MARGIN = 3.0, 2.0  # a smoothed loss above FACTOR * the lowest + MARGIN (nats) has diverged


class Diverged(OboleError):
    """A training that has come to numbers that are none, or gets worse and worse."""


@dataclass(frozen=True, slots=True)
class Watch:
    """`smooth`: the loss of the last steps, the newest counting most; `lowest` it has been; `seen` steps. Losses in nats."""

    smooth: float = 0.0
    lowest: float = math.inf
    seen: int = 0

    @property
    def level(self) -> float:
        """The smoothed loss without the bias of its beginning at 0."""
        return self.smooth / (1 - MEMORY**self.seen) if self.seen else math.inf

    @property
    def is_well(self) -> bool:
        """Whether the state is one to go back to: nearer to the best than to what counts as diverged."""
        return self.seen < SETTLED or self.level <= (1 + FACTOR) / 2 * self.lowest + MARGIN / 2

    def after(self, loss: float, norm: float) -> Watch:
        """The same after one more step. Raises `Diverged` if a number is none, or the loss is far above its best."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"the loss is {loss} and the norm of the gradient {norm}")
        seen = self.seen + 1
        now = Watch(MEMORY * self.smooth + (1 - MEMORY) * loss, self.lowest, seen)
        if seen < SETTLED:
            return now
        if now.level > FACTOR * now.lowest + MARGIN:
            raise Diverged(f"the loss of the last steps is {now.level:.3g}, and was {now.lowest:.3g} at its best")
        return Watch(now.smooth, min(now.lowest, now.level), seen)
