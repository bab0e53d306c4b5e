"""Gemma 3 (text): norms before and after each block, five sliding-window layers to one full, two RoPE bases.

The checkpoint's norm weights arrive as effective weights (1 + w). Source: transformers `models/gemma3/modeling_gemma3.py`.
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
from obole.layers.rope import RopeTable, rope_table
from obole.models.loading import Loader


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Product
    qk_norms: tuple[torch.Tensor, torch.Tensor]
    rope: RopeTable
    shape: AttentionShape
    output: Product
    post_attention_norm: torch.Tensor
    pre_mlp_norm: torch.Tensor
    gate_up: Product
    down: Product
    post_mlp_norm: torch.Tensor


class Gemma3:
    def __init__(self, loader: Loader, config: ModelConfig, context: int, positions: int) -> None:
        self.ops: Ops = loader.ops
        self.config = config
        self.activate = gated_activation(loader.ops, config.activation)
        full = rope_table(config.rope, config.head_dim, config.max_position, context, positions)
        local = rope_table(config.rope_local or config.rope, config.head_dim, config.max_position, context, positions)
        self.embedding = loader.linear("model.embed_tokens.weight")
        self.layers = [
            self._layer(loader, config, i, full if config.window_of(i) is None else local) for i in range(config.num_layers)
        ]
        self.norm = loader.vector("model.norm.weight")
        self.head = self.embedding if config.tie_embeddings else loader.linear("lm_head.weight")
        self.layer_bytes = sum(x.qkv.nbytes + x.output.nbytes + x.gate_up.nbytes + x.down.nbytes for x in self.layers)

    @staticmethod
    def _layer(loader: Loader, config: ModelConfig, i: int, rope: RopeTable) -> Layer:
        at = f"model.layers.{i}."
        attn, mlp = at + "self_attn.", at + "mlp."
        return Layer(
            input_norm=loader.vector(at + "input_layernorm.weight"),
            qkv=loader.product(attn + "qkv_proj", *(attn + f"{x}_proj.weight" for x in "qkv"), bias=config.attention_bias),
            qk_norms=(loader.vector(attn + "q_norm.weight"), loader.vector(attn + "k_norm.weight")),
            rope=rope,
            shape=attention_shape(config, i),
            output=loader.product(attn + "o_proj", attn + "o_proj.weight", bias=config.output_bias),
            post_attention_norm=loader.vector(at + "post_attention_layernorm.weight"),
            pre_mlp_norm=loader.vector(at + "pre_feedforward_layernorm.weight"),
            gate_up=loader.product(mlp + "gate_up_proj", mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down=loader.product(mlp + "down_proj", mlp + "down_proj.weight"),
            post_mlp_norm=loader.vector(at + "post_feedforward_layernorm.weight"),
        )

    def forward(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """Hidden states (R, hidden) before the last norm; keys and values of the R rows are in the pool afterwards."""
        ops, eps = self.ops, self.config.rms_eps
        x = ops.embed(batch.token_ids, self.embedding, self.config.embedding_scale)
        for i, layer in enumerate(self.layers):
            qkv = project(ops, ops.rms_norm(x, layer.input_norm, eps), layer.qkv, batch)
            heads = attend(ops, layer.shape, qkv, layer.qk_norms, layer.rope, batch, pool.layer(i))
            update = ops.rms_norm(project(ops, heads, layer.output, batch), layer.post_attention_norm, eps)
            h = ops.add_rms_norm(update, x, layer.pre_mlp_norm, eps)
            mlp = project(ops, self.activate(project(ops, h, layer.gate_up, batch)), layer.down, batch)
            ops.add_(x, ops.rms_norm(mlp, layer.post_mlp_norm, eps))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(R, hidden) -> float32 (R, vocabulary)."""
        return self.ops.linear(self.ops.rms_norm(hidden, self.norm, self.config.rms_eps), self.head)
