"""A decoder that can be trained: Llama, Qwen2, Qwen3 and Gemma 3, the same functions that `models/` computes.

Rows that stand for one sequence need not be in its order: which column attends to which, and at what position it stands, are
arguments. Parameters are the matrices of the checkpoint, those with one input beside each other; Gemma's norm weights are
effective ones (1 + w), as a `Checkpoint` presents them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from obole.config import ModelConfig
from obole.errors import ModelError
from obole.kernels.formats import dequantize
from obole.layers.rope import context_limit, rope_table
from obole.models.registry import MODELS
from obole.weights.checkpoint import Checkpoint

MOST_POSITIONS = 1 << 15  # of one training sequence
INITIAL_DEVIATION = 0.02  # of weights drawn anew, as GPT-2 has it
MASK_NOISE = 0.01  # of the deviation of the embedding, in the mask's first row


class Seen(NamedTuple):
    """What the layers of one kind see: `cos`, `sin` (S, 1, head_dim / 2), and `allow` (S, S), query by column."""

    cos: Tensor
    sin: Tensor
    allow: Tensor


class Product(nn.Module):
    """x @ W.T + b for one or several matrices of the same input, their outputs side by side.

    `adapter`: what is added to the output at masked columns (see `adapter.py`); None: nothing.
    """

    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor, masked: Tensor | None) -> Tensor:
        """(B, S, inputs) -> (B, S, outputs). `masked`: int64 columns at which the adapter counts; None: at none."""
        y = F.linear(x, self.weight, self.bias)
        if self.adapter is None or masked is None:
            return y
        return y.index_add(1, masked, self.adapter(x.index_select(1, masked)).to(y.dtype))


class Norm(nn.Module):
    """RMSNorm over the last dimension, at least in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(widened(x), self.weight.shape, widened(self.weight), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Product(config.hidden_size, rows, config.attention_bias, dtype)
        self.output = Product(self.heads * self.head_dim, config.hidden_size, config.output_bias, dtype)
        self.q_norm, self.k_norm = (
            Norm(config.head_dim, config.rms_eps, dtype) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, seen: Seen, masked: Tensor | None) -> Tensor:
        rows = self.qkv(x, masked).unflatten(-1, (-1, self.head_dim))
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        q, k = (_turned(part, seen).to(v.dtype) for part in (self.q_norm(q), self.k_norm(k)))
        heads = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=seen.allow,
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        y: Tensor = self.output(heads.transpose(1, 2).flatten(2), masked)
        return y


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gelu = config.activation == "gelu_tanh"
        self.gate_up = Product(hidden, 2 * inner, config.mlp_bias, dtype)
        self.down = Product(inner, hidden, config.mlp_bias, dtype)

    def forward(self, x: Tensor, masked: Tensor | None) -> Tensor:
        gate, up = self.gate_up(x, masked).chunk(2, dim=-1)
        y: Tensor = self.down((F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * up, masked)
        return y


class Layer(nn.Module):
    """Attention and MLP, each with a norm before it and, in Gemma, another one behind it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()

        def norm(exists: bool = True) -> nn.Module:
            return Norm(config.hidden_size, config.rms_eps, dtype) if exists else nn.Identity()

        gemma = config.architecture == "gemma3"
        self.attention = Attention(config, dtype)
        self.mlp = GatedMLP(config, dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.post_attention_norm, self.post_mlp_norm = norm(gemma), norm(gemma)

    def forward(self, x: Tensor, seen: Seen, masked: Tensor | None) -> Tensor:
        x = x + self.post_attention_norm(self.attention(self.attention_norm(x), seen, masked))
        y: Tensor = x + self.post_mlp_norm(self.mlp(self.mlp_norm(x), masked))
        return y


class Decoder(nn.Module):
    """A decoder-only transformer with fresh, unset parameters: see `load_decoder` and `plain`.

    `checkpointing`: keep no activations inside layers for the backward pass, and compute them a second time instead.
    """

    rope_full: Tensor  # cosines and sines (2, positions, head_dim / 2)
    rope_local: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if config.architecture not in MODELS or config.attention_softcap is not None:
            what = "soft-capped attention" if config.architecture in MODELS else f"architecture {config.architecture!r}"
            raise ModelError(f"A model with {what} cannot be trained; choose one of {', '.join(MODELS)} without.")
        self.config = config
        self.checkpointing = False
        self.embedding = Product(config.hidden_size, config.vocab_size, False, dtype)
        self.layers = nn.ModuleList(Layer(config, dtype) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_eps, dtype)
        self.head = None if config.tie_embeddings else Product(config.hidden_size, config.vocab_size, False, dtype)
        for name, rope in (("full", config.rope), ("local", config.rope_local or config.rope)):
            length = min(context_limit(config), MOST_POSITIONS)
            table = rope_table(rope, config.head_dim, config.max_position, config.max_position, length)
            self.register_buffer(f"rope_{name}", torch.stack([table.cos, table.sin]), persistent=False)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        allow: Tensor,
        wanted: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, n, V), float32, or float64 where the parameters are.

        `ids`: int64 (B, S); `positions`: int64 (S,), below the model's longest; `allow`: bool (S, S), whether query q sees
        column c, at least itself; `wanted`: int64 (n,), the columns whose logits are computed, None: all; `masks`: bool
        (S,), the columns at which adapters count, None: none.
        """
        masked = None if masks is None else masks.nonzero().flatten()
        seen = self._seen(positions, allow)
        x = F.embedding(ids, self.embedding.weight)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        for i, layer in enumerate(self.layers):
            sees = seen[self.config.window_of(i) is not None]
            if self.checkpointing and torch.is_grad_enabled():
                x = recomputed(layer, x, sees, masked, use_reentrant=False)
            else:
                x = layer(x, sees, masked)
        x = self.norm(x if wanted is None else x.index_select(1, wanted))
        y: Tensor = (self.embedding if self.head is None else self.head)(x, None)
        return widened(y)

    def _seen(self, positions: Tensor, allow: Tensor) -> tuple[Seen, Seen]:
        """For layers with full attention, and for those with a window, which counts positions and not columns."""
        cos, sin = self.rope_full[:, positions, None]
        full = Seen(cos, sin, allow)
        if self.config.sliding_window is None:
            return full, full
        near = positions[:, None] - positions[None, :] < self.config.sliding_window
        cos, sin = self.rope_local[:, positions, None]
        return full, Seen(cos, sin, allow & near)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their names in a `Checkpoint`, as views: writing to one changes the model."""
        found: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm.weight}
        if self.head is not None:
            found["lm_head.weight"] = self.head.weight
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            found |= {f"model.layers.{i}.{name}": part for name, part in _layer_tensors(layer, self.config).items()}
        return {name: part.detach() for name, part in found.items()}


def widened(x: Tensor) -> Tensor:
    """The same in float32, unless it is in float64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _turned(x: Tensor, seen: Seen) -> Tensor:
    """Rotary position embedding of (B, S, heads, head_dim), half-split."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * seen.cos - b * seen.sin, b * seen.cos + a * seen.sin], dim=-1)


def _layer_tensors(layer: Layer, config: ModelConfig) -> dict[str, Tensor]:
    attention, mlp = layer.attention, layer.mlp
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = (
        (attention.qkv, {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}),
        (attention.output, {"self_attn.o_proj": config.hidden_size}),
        (mlp.gate_up, {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}),
        (mlp.down, {"mlp.down_proj": config.hidden_size}),
    )
    found: dict[str, Tensor] = {}
    for product, sizes in products:
        for kind, parameter in (("weight", product.weight), ("bias", product.bias)):
            if parameter is not None:
                parts = torch.split(parameter, list(sizes.values()))
                found |= {f"{name}.{kind}": part for name, part in zip(sizes, parts, strict=True)}
    gemma = config.architecture == "gemma3"
    norms = {
        "input_layernorm": layer.attention_norm,
        "pre_feedforward_layernorm" if gemma else "post_attention_layernorm": layer.mlp_norm,
        "self_attn.q_norm": attention.q_norm,
        "self_attn.k_norm": attention.k_norm,
    }
    if gemma:
        norms |= {"post_attention_layernorm": layer.post_attention_norm, "post_feedforward_layernorm": layer.post_mlp_norm}
    return found | {f"{name}.weight": norm.weight for name, norm in norms.items() if isinstance(norm, Norm)}


def load_decoder(checkpoint: Checkpoint, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model of a GGUF file or a Hugging Face folder, its weights dequantised to `dtype`, on the CPU.

    Raises `ModelError` for a model that cannot be trained.
    """
    decoder = Decoder(checkpoint.config, dtype)
    for name, view in decoder.tensors().items():
        view.copy_(torch.from_numpy(dequantize(checkpoint.tensors[name])))
        checkpoint.drop_pages()
    return decoder


def add_mask_token(decoder: Decoder, mask_id: int, seed: int) -> None:
    """Give the token `mask_id`, the first one unused, the mean of the embeddings of all tokens before it, with a little noise.

    Embedding and head grow by a row where they have none for it. In place, before an optimiser takes hold of the parameters:
    those that grow are new ones. Raises `ModelError` if the matrices end before `mask_id`.
    """
    rows = decoder.config.vocab_size
    if not 0 < mask_id <= rows:
        raise ModelError(f"The mask cannot be token {mask_id}: the model has rows for {rows} tokens, so {rows} is the next.")
    generator = torch.Generator().manual_seed(seed)
    for matrix in (decoder.embedding, decoder.head):
        if matrix is None:
            continue
        old = matrix.weight.detach()
        known = old[:mask_id].float()
        noise = torch.randn(known.shape[1], generator=generator).to(known.device)
        row = (known.mean(0) + MASK_NOISE * known.std() * noise).to(old.dtype)
        if mask_id == rows:
            matrix.weight = nn.Parameter(torch.cat([old, row[None]]))
        else:
            old[mask_id] = row
    decoder.config = dataclasses.replace(decoder.config, vocab_size=max(rows, mask_id + 1))


def plain(config: ModelConfig, seed: int) -> Decoder:
    """A model to be trained from nothing: weights N(0, 0.02²), those that write to the residual stream 1/√(2 layers) of that.

    Source: GPT-2 (Radford et al. 2019, section 2.3). Norms are one, biases zero.
    """
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    for name, view in decoder.tensors().items():
        if name.endswith("bias"):
            view.zero_()
        elif "norm" in name:
            view.fill_(1.0)
        else:
            writes = "o_proj" in name or "down_proj" in name
            deviation = INITIAL_DEVIATION / math.sqrt(2 * config.num_layers) if writes else INITIAL_DEVIATION
            view.normal_(0.0, deviation, generator=generator)
    return decoder
