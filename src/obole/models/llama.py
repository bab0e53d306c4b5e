"""Llama, Qwen2 and Qwen3: pre-norm decoder layers with gated MLPs.

Qwen2 adds a bias to q, k and v; Qwen3 normalises q and k per head. Nothing else differs.
Source: transformers `models/{llama,qwen2,qwen3}/modeling_*.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from obole.cache.pool import KVPool
from obole.config import ModelConfig
from obole.kernels.ops import Ops
from obole.layers.attention import AttentionShape, attend, attention_shape
from obole.layers.batch import Batch
from obole.layers.linear import Product, project
from obole.layers.mlp import gated_activation
from obole.layers.rope import rope_table
from obole.models.loading import Loader


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: Product
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    shape: AttentionShape
    output: Product
    mlp_norm: torch.Tensor
    gate_up: Product
    down: Product


class Llama:
    def __init__(self, loader: Loader, config: ModelConfig, context: int, positions: int) -> None:
        self.ops: Ops = loader.ops
        self.config = config
        self.activate = gated_activation(loader.ops, config.activation)
        self.embedding = loader.linear("model.embed_tokens.weight")
        self.layers = [self._layer(loader, config, i) for i in range(config.num_layers)]
        self.norm = loader.vector("model.norm.weight")
        self.head = self.embedding if config.tie_embeddings else loader.linear("lm_head.weight")
        self.rope = rope_table(config.rope, config.head_dim, config.max_position, context, positions)
        self.layer_bytes = sum(x.qkv.nbytes + x.output.nbytes + x.gate_up.nbytes + x.down.nbytes for x in self.layers)

    @staticmethod
    def _layer(loader: Loader, config: ModelConfig, i: int) -> Layer:
        at = f"model.layers.{i}."
        attn, mlp = at + "self_attn.", at + "mlp."
        norms = None
        if config.qk_norm:
            norms = (loader.vector(attn + "q_norm.weight"), loader.vector(attn + "k_norm.weight"))
        return Layer(
            attention_norm=loader.vector(at + "input_layernorm.weight"),
            qkv=loader.product(attn + "qkv_proj", *(attn + f"{x}_proj.weight" for x in "qkv"), bias=config.attention_bias),
            qk_norms=norms,
            shape=attention_shape(config, i),
            output=loader.product(attn + "o_proj", attn + "o_proj.weight", bias=config.output_bias),
            mlp_norm=loader.vector(at + "post_attention_layernorm.weight"),
            gate_up=loader.product(
                mlp + "gate_up_proj", mlp + "gate_proj.weight", mlp + "up_proj.weight", bias=config.mlp_bias
            ),
            down=loader.product(mlp + "down_proj", mlp + "down_proj.weight", bias=config.mlp_bias),
        )

    def forward(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """Hidden states (R, hidden) before the last norm; keys and values of the R rows are in the pool afterwards."""
        ops, eps = self.ops, self.config.rms_eps
        x = ops.embed(batch.token_ids, self.embedding, 1.0)
        update = None
        for i, layer in enumerate(self.layers):
            norm = layer.attention_norm
            h = ops.rms_norm(x, norm, eps) if update is None else ops.add_rms_norm(update, x, norm, eps)
            qkv = project(ops, h, layer.qkv, batch)
            heads = attend(ops, layer.shape, qkv, layer.qk_norms, self.rope, batch, pool.layer(i))
            h = ops.add_rms_norm(project(ops, heads, layer.output, batch), x, layer.mlp_norm, eps)
            mlp = self.activate(project(ops, h, layer.gate_up, batch))
            update = project(ops, mlp, layer.down, batch)
        if update is not None:
            ops.add_(x, update)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(R, hidden) -> float32 (R, vocabulary)."""
        return self.ops.linear(self.ops.rms_norm(hidden, self.norm, self.config.rms_eps), self.head)
