"""The specification: every operation in plain torch, slow and obvious. Fast kernels are compared with this."""

from obole.kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceOps"]
