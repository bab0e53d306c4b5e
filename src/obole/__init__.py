"""obole: an LLM inference engine, bit-identical however a token was made, with a receipt for every answer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from obole.errors import ConfigError, InvalidRequest, ModelError, OboleError

if TYPE_CHECKING:
    from obole.engine.async_engine import AsyncEngine
    from obole.engine.engine import Engine
    from obole.types import Grammar, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "AsyncEngine",
    "ConfigError",
    "Engine",
    "Grammar",
    "InvalidRequest",
    "ModelError",
    "OboleError",
    "SamplingParams",
    "__version__",
]

# torch takes over a second to import: `import obole` alone, and `obole --help`, do not wait for it; and numpy (for the types)
# is left to the command line to import when it has taken care of Ctrl-C
_LATER = {
    "AsyncEngine": "obole.engine.async_engine",
    "Engine": "obole.engine.engine",
    "Grammar": "obole.types",
    "SamplingParams": "obole.types",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'obole' has no attribute {name!r}")
