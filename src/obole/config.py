"""What a checkpoint says of itself, and what the user may set. The only source of defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from obole.errors import ConfigError
from obole.types import SPECULATE

UNITS = {"": 1, "B": 1}
UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}

DRAFT_MEMORY = 64 << 20  # bytes
MAX_POSITIONS = 1 << 24  # of a context: tables for more would not fit, and no model has them
BLOCK_SIZE = 16  # tokens in a KV block, and lanes in an AVX-512 register of floats: one block fills one register
# Tokens that end a turn or a document, whatever a checkpoint's metadata say: files often name only one of several.
END_OF_TURN_TOKENS = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (half-split form: dimension i turns with i + d/2).

    `kind`: "default", "linear", "dynamic", "llama3" or "yarn", with the parameters of the Hugging Face `rope_parameters`.
    `freq_factors`: divisors of the frequencies given by a GGUF file (`rope_freqs.weight`), one for each pair.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class MultiToken:
    """That a model predicts several tokens in one pass: the n-th mask behind the newest token says which one comes n + 1 places
    after it. `mask_id` is the id of the mask, which like all ids beyond is never chosen; `most`: tokens of a pass.
    """

    mask_id: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, the same whether it came from `config.json` or from GGUF metadata."""

    architecture: str  # "llama", "qwen2", "qwen3", "gemma3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope: RopeConfig
    rope_local: RopeConfig | None = None  # for the sliding-window layers of gemma3
    tie_embeddings: bool = False
    attention_bias: bool = False  # bias on q, k, v (qwen2)
    output_bias: bool = False  # bias on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"  # or "gelu_tanh"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    embedding_scale: float = 1.0
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()  # per layer; empty: none
    attention_softcap: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    multi_token: MultiToken | None = None

    def window_of(self, layer: int) -> int | None:
        """Positions that a token sees in this layer, its own included; None: all before it."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None


def _count(name: str, value: object, most: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r}.")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}.")


def parse_size(text: str) -> int:
    """Bytes from "2GiB", "500MB" or "1073741824". `2G` is refused, since it means 7 % more to some than to others.

    Raises `ConfigError`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in UNITS:
        raise ConfigError(f"{text!r} is not a size; write it like 2GiB, 500MB or 1073741824.")
    return int(Decimal(match[1]) * UNITS[match[2].upper()])


def parse_ssd(text: str) -> tuple[str, int]:
    """Folder and bytes from "DIR:SIZE". Raises `ConfigError`."""
    folder, colon, size = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    try:
        count = parse_size(size) if folder and colon else 0
    except ConfigError:
        count = 0
    if not 0 < count <= 1 << 60:
        raise ConfigError(f"kv_ssd must be a folder and a size, such as /var/cache/obole:100GiB, not {text!r}.")
    return folder, count


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_batch_tokens: int = 512  # rows in one step
    step_stretch: float = 3.0  # times that prompts and drafts may lengthen a step in which others wait for their next token
    max_sequences: int = 256  # running at once
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        _count("max_batch_tokens", self.max_batch_tokens, 1 << 20)
        _count("max_sequences", self.max_sequences, 1 << 20)
        stretch = self.step_stretch
        if isinstance(stretch, bool) or not isinstance(stretch, int | float) or not 1 <= stretch <= 1e6:
            raise ConfigError(f"step_stretch must be a number from 1 to 1000000, not {stretch!r}.")
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError(f"prefix_cache must be true or false, not {self.prefix_cache!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    kv_device: int | None = None  # bytes of the KV pool; None: from free memory
    kv_ram: int | None = None  # bytes of memory for blocks that the pool has given up; None: none
    kv_ssd: str | None = None  # "DIR:SIZE", a folder for blocks and the bytes it may take; None: none
    kv_dtype: str = "auto"  # "float32", "bfloat16", "int8", "fp8"; auto: float32 for float32 checkpoints, else bfloat16
    max_context: int | None = None  # None: what the model was made for
    threads: int | None = None  # None: the processors this process may use
    quantize: str = "none"  # "q8_0": matrices that are not quantised in the file, to 8 bits in groups of 32
    kernels: str = "auto"  # "native", "reference"; auto: native
    speculate: str = (
        "auto"  # which drafts requests try that do not say: "off", a source of drafts, or auto: all, where they pay
    )
    draft: str | None = None  # a smaller model of the same vocabulary that drafts
    draft_acceptance: str = "coupled"  # when its tokens are right: "coupled", if the model chooses them; "resample", by chance
    draft_memory: int | None = None  # bytes of earlier texts kept to draft from, as much again for indexes; None: 64 MiB
    draft_memory_seconds: int = 3600  # that a text is kept after it was last added to
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        _choice("kv_dtype", self.kv_dtype, ("auto", "float32", "bfloat16", "int8", "fp8"))
        _choice("speculate", self.speculate, SPECULATE)
        if self.draft is not None and not isinstance(self.draft, str):
            raise ConfigError(f"draft must be the name of a model, not {self.draft!r}.")
        if self.speculate == "draft" and self.draft is None:
            raise ConfigError("speculate is draft, but there is no model that drafts: set draft to one.")
        _choice("draft_acceptance", self.draft_acceptance, ("coupled", "resample"))
        if self.draft_memory is not None:
            _count("draft_memory", self.draft_memory, 1 << 50, least=0)
        _count("draft_memory_seconds", self.draft_memory_seconds, 1 << 40, least=0)
        _choice("quantize", self.quantize, ("none", "q8_0"))
        _choice("kernels", self.kernels, ("auto", "native", "reference"))
        if self.kv_ssd is not None:
            parse_ssd(self.kv_ssd)
        if not self.scheduler.prefix_cache and (self.kv_ram is not None or self.kv_ssd is not None):
            raise ConfigError("kv_ram and kv_ssd are of no use while prefix_cache is off: leave them out, or it on.")
        for name, most in (("kv_device", 1 << 50), ("kv_ram", 1 << 50), ("max_context", MAX_POSITIONS), ("threads", 1024)):
            value = getattr(self, name)
            if value is not None:
                _count(name, value, most)


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Build an `EngineConfig` from flat keyword arguments. Raises `ConfigError` for a key that does not exist."""
    own = {f.name for f in dataclasses.fields(EngineConfig)} - {"scheduler"}
    inner = {f.name for f in dataclasses.fields(SchedulerConfig)}
    for key in settings:
        if key not in own | inner:
            raise ConfigError(f"There is no setting {key!r}; there are {', '.join(sorted(own | inner))}.")
    scheduler = SchedulerConfig(**{k: v for k, v in settings.items() if k in inner})
    return EngineConfig(scheduler=scheduler, **{k: v for k, v in settings.items() if k in own})
