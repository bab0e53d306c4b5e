"""obole: an LLM inference engine, bit-identical however a token was made, with a receipt for every answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from obole.errors import ConfigError, InvalidRequest, ModelError, OboleError

if TYPE_CHECKING:
    from obole.engine.engine import Engine
    from obole.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["ConfigError", "Engine", "InvalidRequest", "ModelError", "OboleError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # torch takes over a second to import: `import obole` alone, and `obole --help`, do not wait for it; and numpy (for
    # the types) is left to the command line to import when it has taken care of Ctrl-C
    if name == "Engine":
        from obole.engine.engine import Engine

        return Engine
    if name == "SamplingParams":
        from obole.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'obole' has no attribute {name!r}")
