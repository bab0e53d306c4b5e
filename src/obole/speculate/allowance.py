"""What a sequence may lose on drafts: a little of what it has yielded, and all that drafts have gained it. Pure.

Chances of acceptance are estimates, and the first ones guesses; what they promise may not come. The allowance bounds what can be
lost whatever the estimates say: after t tokens no sequence is behind one without drafts by more than START + SHARE * t tokens,
as far as the cost of rows is known. A draft that is right fills the allowance at once, so text that can be copied waits for
nothing.

The unit is the token: what a step without drafts yields in the time that is lost or gained.
"""

from __future__ import annotations

from typing import Any

import numpy as np

START = 0.5
SHARE = 0.02

Floats = np.ndarray[Any, np.dtype[np.float64]]


def prices(seconds: Floats, decoding: int, extra: float) -> Floats:
    """Tokens that r drafted rows cost, if all are in vain, for r from 0. `seconds[r]`: time of the step with r of them;
    `extra`: seconds that each adds beside; `decoding`: sequences that yield a token whatever is drafted."""
    lost: Floats = (seconds - seconds[0] + extra * np.arange(seconds.size)) * (decoding / seconds[0])
    return lost


def affordable(allowance: float, lost: Floats) -> int:
    """Most rows that a sequence may draft; `lost`: their `prices`, which never decrease."""
    return max(0, int(np.searchsorted(lost, allowance, side="right")) - 1)
