"""Every error that obole raises on purpose. One sentence each, saying what to do."""

from __future__ import annotations


class OboleError(Exception):
    """Base class: the message is meant for the person at the terminal."""


class InvalidRequest(OboleError, ValueError):
    """A request that cannot be served as asked; `field` names what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ModelError(OboleError):
    """A model that cannot be loaded: damaged, incomplete, unsupported or not found."""


class ConfigError(OboleError, ValueError):
    """A setting that does not exist or cannot be met."""


class Overloaded(OboleError):
    """Too many requests are waiting already: this one was turned away before anything was done for it."""


class EngineClosed(OboleError):
    """The engine takes no more requests."""


class EngineFailure(OboleError):
    """An answer that was lost through no fault of its request; `__cause__` is what went wrong."""
