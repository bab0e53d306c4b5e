"""Typed access to the fields of an untrusted configuration, and the checks that both sources of one share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from obole.config import ModelConfig, RopeConfig
from obole.errors import ModelError

MAX_COUNT = 2**31 - 1
SMALLEST, LARGEST = 1e-30, 1e30  # of a number, so that quotients of two stay finite


@dataclass(frozen=True, slots=True)
class Fields:
    """`where` (a file) and `prefix` (a place in it) name the field in the `ModelError` for a missing or wrong value.

    A null counts as missing. A default of None makes a field optional.
    """

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.optional_integer(key, low)
        if value is None:
            value = default
        return self._required(key) if value is None else value

    def optional_integer(self, key: str, low: int = 1) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= MAX_COUNT:
            self.fail(key, f"must be a whole number from {low} to {MAX_COUNT}, not {_short(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional_number(key)
        if value is None:
            value = default
        return self._required(key) if value is None else value

    def optional_number(self, key: str) -> float | None:
        """A number from `SMALLEST` to `LARGEST`."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not SMALLEST <= value <= LARGEST:
            self.fail(key, f"must be a number from {SMALLEST:g} to {LARGEST:g}, not {_short(value)}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {_short(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            return self._required(key)
        if not isinstance(value, str):
            self.fail(key, f"must be text, not {_short(value)}")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; nothing if the field is missing."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                self.fail(key, f"is {_short(value)}, but the vocabulary has the ids 0 to {vocab_size - 1}")
        return tuple(ids)

    def fail(self, key: str, message: str) -> NoReturn:
        raise ModelError(f"{self.where}: {self.prefix}{key} {message}.")

    def _required(self, key: str) -> NoReturn:
        self.fail(key, "is missing")


def check_config(config: ModelConfig, where: str) -> ModelConfig:
    """Refuse dimensions that do not fit one another; returns `config`."""

    def fail(message: str) -> NoReturn:
        raise ModelError(f"{where}: {message}.")

    if config.num_heads % config.num_kv_heads:
        fail(f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        fail(f"heads of {config.head_dim} cannot be turned by RoPE: the size must be even")
    if config.sliding_layers and len(config.sliding_layers) != config.num_layers:
        fail(f"there are {len(config.sliding_layers)} layer types for {config.num_layers} layers")
    if any(config.sliding_layers) and config.sliding_window is None:
        fail("there are sliding-window layers, but no window is given")
    for rope in (config.rope, config.rope_local):
        if rope is not None:
            _check_rope(rope, config.head_dim, fail)
    return config


def _check_rope(rope: RopeConfig, head_dim: int, fail: Any) -> None:
    if rope.kind in ("yarn", "dynamic") and rope.theta <= 1:
        fail(f"the RoPE base {rope.theta} must be above 1 for the scaling {rope.kind!r}")
    if rope.kind == "dynamic" and head_dim <= 2:
        fail("heads of 2 cannot be used with the RoPE scaling 'dynamic'")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        fail(f"the RoPE high_freq_factor {rope.high_freq_factor} must be above low_freq_factor {rope.low_freq_factor}")
    if rope.freq_factors is not None and len(rope.freq_factors) != head_dim // 2:
        fail(f"rope_freqs.weight has {len(rope.freq_factors)} factors, but heads of {head_dim} need {head_dim // 2}")


def yarn_context(max_position: int, rope: RopeConfig) -> int:
    """YaRN states the trained length and the factor; the configured maximum may be either the trained or the final one."""
    if rope.kind != "yarn" or rope.original_max_position is None:
        return max_position
    return max(max_position, min(MAX_COUNT, int(rope.original_max_position * rope.factor)))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
