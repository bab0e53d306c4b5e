"""obole: an LLM inference engine, bit-identical however a token was made, with a receipt for every answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from obole.errors import ConfigError, InvalidRequest, ModelError, OboleError
from obole.types import SamplingParams

if TYPE_CHECKING:
    from obole.engine.engine import Engine

__version__ = "0.1.0"
__all__ = ["ConfigError", "Engine", "InvalidRequest", "ModelError", "OboleError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # torch takes over a second to import: `import obole` alone, and `obole --help`, do not wait for it
    if name == "Engine":
        from obole.engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'obole' has no attribute {name!r}")
