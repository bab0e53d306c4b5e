"""Low-rank adapters that count at masks only, so that what the model says of the next token stays exactly the original's.

Source: LoRA (arXiv 2106.09685, section 4.1), gated as in "Your LLM knows the future" (arXiv 2507.11851).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from obole.distill.model import Decoder, Layer, Product
from obole.errors import ModelError

FILE = "multi_token_adapter.safetensors"


class LowRank(nn.Module):
    """x @ down.T @ up.T * alpha / rank. Without effect at first, since `up` is zero."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.down = nn.Parameter(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x.to(self.down.dtype), self.down), self.up) * (self.alpha / len(self.down))


def add_adapters(decoder: Decoder, rank: int, alpha: float, seed: int) -> None:
    """Give every product inside the layers a pair of matrices, float32, and freeze all other parameters. In place.

    Products that share their input (q, k and v; gate and up) share a pair.
    """
    decoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for _, product in _products(decoder):
        outputs, inputs = product.weight.shape
        product.adapter = LowRank(inputs, outputs, rank, alpha, generator).to(product.weight.device)


def adapter_facts(decoder: Decoder) -> dict[str, Any] | None:
    """What config.json says of the adapters beside their file; None for a model without them."""
    for _, product in _products(decoder):
        if isinstance(product.adapter, LowRank):
            return {"file": FILE, "rank": len(product.adapter.down), "alpha": product.adapter.alpha}
    return None


def adapter_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The adapters' matrices as they are stored, by name: "...lora_A" (rank, inputs) and "...lora_B" (outputs, rank)."""
    found: dict[str, Tensor] = {}
    for name, product in _products(decoder):
        if isinstance(product.adapter, LowRank):
            found |= {f"{name}.lora_A": product.adapter.down.detach(), f"{name}.lora_B": product.adapter.up.detach()}
    return found


def load_adapters(decoder: Decoder, tensors: Mapping[str, Tensor], alpha: float) -> None:
    """Give a model the adapters of `adapter_tensors`, and freeze all else. Raises `ModelError` if they are of another model."""
    ranks = {len(tensor) for name, tensor in tensors.items() if name.endswith("lora_A")}
    if len(ranks) != 1:
        raise ModelError(f"The adapters must all be of one rank, not of {sorted(ranks)}: the file is damaged.")
    add_adapters(decoder, ranks.pop(), alpha, 0)
    views = adapter_tensors(decoder)
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: view.shape for name, view in views.items()}:
        raise ModelError("The adapters do not fit the model: they were trained for another one.")
    for name, view in views.items():
        view.copy_(tensors[name])


def _products(decoder: Decoder) -> Iterator[tuple[str, Product]]:
    for i, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        attention, mlp = layer.attention, layer.mlp
        yield f"model.layers.{i}.self_attn.qkv_proj", attention.qkv
        yield f"model.layers.{i}.self_attn.o_proj", attention.output
        yield f"model.layers.{i}.mlp.gate_up_proj", mlp.gate_up
        yield f"model.layers.{i}.mlp.down_proj", mlp.down
