"""Opens a model, whatever its format: a configuration, and tensors under canonical names.

Above this module, a GGUF file and a Hugging Face folder of the same weights look the same: names and shapes are those of
transformers, RoPE is half-split, and the weights of Gemma's norms already include the one that is added to them.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from blake3 import blake3

from obole.config import ModelConfig
from obole.errors import ModelError
from obole.types import WeightTensor
from obole.weights.adapter import read_adapter
from obole.weights.derived import plus_one, renamed, unpermuted
from obole.weights.gguf import read_gguf
from obole.weights.gguf_config import config_from_gguf
from obole.weights.hf_config import config_from_hf
from obole.weights.kinds import row_bytes
from obole.weights.layout import IGNORED_GGUF, IGNORED_HF, canonical_name, check_tensors
from obole.weights.mapped import backing_map, read_json
from obole.weights.safetensors import read_folder, shard_paths
from obole.weights.verified import checked_digest

CONFIG = "config.json"
GENERATION = "generation_config.json"


@dataclass(frozen=True, eq=False)  # without slots, so that the digest can be kept
class Checkpoint:
    """A model whose every tensor has been found in its place, of the right shape.

    `tensors`: by Hugging Face names ("model.layers.0.self_attn.q_proj.weight"); "lm_head.weight" only where it is not
    tied to the embedding. `gguf_metadata`: for the tokenizer; None for a folder. `folder`: None for a GGUF file.
    `adapter`: what is added to products at masks, "model.layers.0.self_attn.qkv_proj.lora_A" (rank, in) and "...lora_B"
    (out, rank), if the model was taught several tokens by that.
    `files`: all that determines what the model computes; `maps`: what of them is mapped into memory.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, WeightTensor]
    gguf_metadata: Mapping[str, Any] | None
    folder: Path | None
    files: tuple[Path, ...]
    maps: tuple[mmap.mmap, ...]
    adapter: Mapping[str, WeightTensor] = field(default_factory=dict)

    def drop_pages(self) -> None:
        """Let go of what was read of the files so far: it stays in the system's cache, but is no longer our memory."""
        for one in self.maps:
            one.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they are presented."""
        return sum(int(np.prod(t.shape[:-1])) * row_bytes(t.kind, t.shape[-1]) for t in self.tensors.values())

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 (32 bytes) over the contents of `files`; computed when first asked for, at the speed of memory.

        Raises `ModelError` if a digest was stored beside a file when that was verified, and it is another one.
        """
        digests = [checked_digest(path) for path in self.files]
        return digests[0] if len(digests) == 1 else blake3(b"".join(digests)).digest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a folder with config.json and safetensors. Nothing is read but headers.

    Raises `ModelError` for anything that is damaged, incomplete or not supported.
    """
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    config = config_from_gguf(file)
    tensors: dict[str, WeightTensor] = {}
    for original, tensor in file.tensors.items():
        name = canonical_name(original, config.architecture)
        if name is None:
            if IGNORED_GGUF.fullmatch(original) and config.architecture == "llama":
                continue
            raise ModelError(f"{path}: tensor {original!r} has no place in a {config.architecture} model.")
        tensors[name] = renamed(tensor, name)
    check_tensors(config, tensors, str(path))
    if config.architecture == "llama":
        for name, tensor in tensors.items():
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
            if heads is not None:
                tensors[name] = unpermuted(tensor, heads)
    return Checkpoint(path, config, MappingProxyType(tensors), file.metadata, None, (path,), _maps(file.tensors))


def _open_folder(folder: Path) -> Checkpoint:
    if not (folder / CONFIG).exists():
        raise ModelError(f"{folder}: the folder holds no {CONFIG}; give a Hugging Face model folder or a .gguf file.")
    generation = read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    document = read_json(folder / CONFIG)
    config = config_from_hf(document, generation, str(folder))
    stored = read_folder(folder)
    tensors = {name: tensor for name, tensor in stored.items() if not IGNORED_HF.fullmatch(name)}
    if config.tie_embeddings and "lm_head.weight" in tensors:
        _drop_tied_head(tensors, folder)
    check_tensors(config, tensors, str(folder))
    if config.architecture == "gemma3":
        tensors = {name: plus_one(t) if name.endswith("norm.weight") else t for name, t in tensors.items()}
    files = (folder / CONFIG, *shard_paths(folder))
    adapter: Mapping[str, WeightTensor] = {}
    facts = document.get("multi_token", {}).get("adapter") if config.multi_token is not None else None
    if facts is not None:
        file, adapter = read_adapter(folder, config, facts)
        files = (*files, file)
    return Checkpoint(folder, config, MappingProxyType(tensors), None, folder, files, _maps(stored), adapter)


def _maps(stored: Mapping[str, WeightTensor]) -> tuple[mmap.mmap, ...]:
    found = (backing_map(tensor.data) for tensor in stored.values())
    return tuple({id(one): one for one in found if one is not None}.values())


def _drop_tied_head(tensors: dict[str, WeightTensor], folder: Path) -> None:
    """Some checkpoints store the tied head a second time; a different one would mean that the configuration is wrong."""
    head, embedding = tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if embedding is None or head.kind != embedding.kind or not np.array_equal(head.data, embedding.data):
        raise ModelError(f"{folder}: tie_word_embeddings is on, but 'lm_head.weight' differs from 'model.embed_tokens.weight'.")
