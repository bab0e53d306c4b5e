"""Who computes the operations of `kernels/ops.py`: the native kernels, or the reference."""

from __future__ import annotations

import os

from obole.errors import ConfigError
from obole.kernels.ops import Ops

ISA_VARIABLE = "OBOLE_ISA"  # forces an instruction set: "portable", "avx2", "avx512vnni" or "amx"


def load_ops(kind: str, threads: int, isa: str | None = None) -> Ops:
    """`kind`: "auto" or "native" (C++), or "reference". `threads` counts the caller's.

    `isa`, or else the environment variable OBOLE_ISA, forces an instruction set of the native kernels; without one, the
    best that this machine has. Raises `ConfigError` for what is not known or not available here.
    """
    if kind not in ("auto", "native", "reference"):
        raise ConfigError(f"kernels must be one of auto, native, reference, not {kind!r}.")
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}.")
    if kind == "reference":
        from obole.kernels.reference import ReferenceOps

        return ReferenceOps()
    try:
        from obole.kernels.cpu import NativeOps
    except ImportError as error:
        raise ConfigError(
            f"The native kernels cannot be loaded ({error}): install obole again, or set kernels to 'reference' (slow)."
        ) from error
    return NativeOps(threads, isa or os.environ.get(ISA_VARIABLE) or "auto")
