"""A low-rank adapter for masks beside a model's weights, as `obole distill --lora` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from obole.config import ModelConfig
from obole.errors import ModelError
from obole.types import WeightTensor
from obole.weights.derived import scaled
from obole.weights.fields import Fields
from obole.weights.safetensors import read_safetensors


def read_adapter(folder: Path, config: ModelConfig, facts: object) -> tuple[Path, Mapping[str, WeightTensor]]:
    """The file, and its tensors by name; "...lora_B" are already times alpha / rank. `facts`: what config.json says of it.

    Raises `ModelError` for a file that is missing, or does not fit the model.
    """
    if not isinstance(facts, dict):
        raise ModelError(f"{folder}/config.json: multi_token.adapter must be an object.")
    fields = Fields(facts, f"{folder}/config.json", "multi_token.adapter.")
    name, rank, alpha = fields.text("file"), fields.integer("rank"), fields.number("alpha")
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise ModelError(f"{folder}: the adapter {name!r} is missing from the folder; fetch it again.")
    tensors = dict(read_safetensors(path))
    wanted = adapter_shapes(config, rank)
    for key, shape in wanted.items():
        found = tensors.get(key)
        if found is None or found.shape != shape:
            has = "is missing" if found is None else f"has the shape {found.shape}, not {shape}"
            raise ModelError(f"{path}: tensor {key!r} {has}: the adapter is of another model.")
    for key in tensors.keys() - wanted.keys():
        raise ModelError(f"{path}: tensor {key!r} has no place in a {config.architecture} model.")
    factor = alpha / rank
    return path, MappingProxyType({k: scaled(t, factor) if k.endswith("lora_B") else t for k, t in tensors.items()})


def adapter_shapes(config: ModelConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """Products that share their input share a pair."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    products = {
        "self_attn.qkv_proj": (hidden, (heads + 2 * kv_heads) * dim),
        "self_attn.o_proj": (heads * dim, hidden),
        "mlp.gate_up_proj": (hidden, 2 * inner),
        "mlp.down_proj": (inner, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config.num_layers):
        for product, (inputs, outputs) in products.items():
            name = f"model.layers.{i}.{product}"
            shapes |= {f"{name}.lora_A": (rank, inputs), f"{name}.lora_B": (outputs, rank)}
    return shapes
