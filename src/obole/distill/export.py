"""Writes a trained model as a Hugging Face folder, which this engine and others open as an ordinary model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from obole.config import MultiToken
from obole.distill.adapter import FILE, adapter_facts, adapter_tensors
from obole.distill.config_json import config_document, generation_document
from obole.distill.model import Decoder
from obole.errors import ModelError, OboleError
from obole.text.folder_tokenizer import read_json, tokenizer_from_folder
from obole.text.gguf_tokenizer import tokenizer_from_gguf
from obole.text.templates import chat_templates_from_gguf
from obole.text.tokenizer import Tokenizer
from obole.weights.checkpoint import CONFIG, GENERATION, Checkpoint
from obole.weights.safetensors import SINGLE

MASK = "<|mtp|>"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
KEPT = ("special_tokens_map.json", "chat_template.jinja", GENERATION)  # of a folder, as they are
KEPT_FOLDER = "additional_chat_templates"


def mask_id_of(checkpoint: Checkpoint, tokenizer: Tokenizer) -> int:
    """The id of the mask: that which the model has already, or else the first one that no token has.

    `tokenizer` is the checkpoint's. Tokens of a GGUF file that only fill up the vocabulary count as none.
    """
    if checkpoint.config.multi_token is not None:
        return checkpoint.config.multi_token.mask_id
    size = tokenizer.vocab_size
    while size and tokenizer.token_text(size - 1) is None:
        size -= 1
    return size


def text_files(checkpoint: Checkpoint, mask_id: int | None) -> dict[str, str]:
    """Contents by name of the files that a model's tokenizer and chat template are in, with `<|mtp|>` as `mask_id`.

    `mask_id` None: without it. Raises `ModelError` for a checkpoint without a tokenizer, and for one that cannot have that
    token with that id.
    """
    if checkpoint.gguf_metadata is not None:
        files = _texts_of_gguf(checkpoint, checkpoint.gguf_metadata)
    elif checkpoint.folder is not None:
        files = _texts_of_folder(checkpoint.folder)
    return files if mask_id is None else _with_mask(files, mask_id, str(checkpoint.path))


def export(
    decoder: Decoder,
    texts: Mapping[str, str],
    folder: Path,
    *,
    source: Checkpoint | None = None,
    multi_token: MultiToken | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write config, weights as `dtype`, and `texts` to `folder`, all or nothing; a model that is there is replaced.

    Adapters go into a file of their own, beside the weights that they were trained for.

    `source`: the checkpoint that the model comes from, whose config.json is kept but for what has changed; None, or a GGUF
    file: it is written anew. `multi_token`: the mask, if it has been taught that.
    Raises `ModelError` for a configuration that config.json cannot state, and `OboleError` where `folder` holds something
    else than a model, or cannot be written.
    """
    document = read_json(source.folder / CONFIG) if source is not None and source.folder else config_document(decoder.config)
    document |= {"vocab_size": decoder.config.vocab_size, "torch_dtype": str(dtype).removeprefix("torch.")}
    document.pop("dtype", None)  # the same in the spelling of transformers 5
    if multi_token is not None:
        document["multi_token"] = {"mask_token_id": multi_token.mask_id, "max_tokens": multi_token.most}
        if (facts := adapter_facts(decoder)) is not None:
            document["multi_token"]["adapter"] = facts
    documents = {GENERATION: _json(generation_document(decoder.config)), **texts, CONFIG: _json(document)}
    with _replacing(folder) as scratch:
        for name, text in documents.items():
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_text(text, encoding="utf-8")
        _save(_stored(decoder, dtype), scratch / SINGLE)
        if adapters := adapter_tensors(decoder):
            _save({name: tensor.cpu() for name, tensor in adapters.items()}, scratch / FILE)


def _stored(decoder: Decoder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    gemma = decoder.config.architecture == "gemma3"
    return {
        # what is stored of Gemma's norms is what exceeds one
        name: (tensor - 1 if gemma and name.endswith("norm.weight") else tensor).to("cpu", dtype).contiguous()
        for name, tensor in decoder.tensors().items()
    }


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})
    shutil.copymode(path.parent / CONFIG, path)  # the library lets nobody else read


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when the block ends well, and goes if it does not."""
    folder = folder.absolute()
    if folder.exists() and not (folder / CONFIG).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OboleError(f"{folder} holds something else than a model, which is not overwritten: choose another folder.")
    scratch, old = (folder.with_name(f".{folder.name}-{kind}-{os.getpid()}") for kind in ("new", "old"))
    try:
        scratch.mkdir(parents=True)
        yield scratch
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
    except (OSError, SafetensorError) as error:  # the library reports a full disk as the latter
        raise OboleError(f"The model could not be written to {folder} ({error}).") from error
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for left in (scratch, old):
            shutil.rmtree(left, ignore_errors=True)


# --- the tokenizer's files --------------------------------------------------------------------------------------------


def _texts_of_folder(folder: Path) -> dict[str, str]:
    tokenizer = tokenizer_from_folder(folder)
    if tokenizer is None:
        raise ModelError(f"{folder} has no {TOKENIZER}, so there is no text to train with: add that of the model.")
    names = [TOKENIZER_CONFIG, *KEPT]
    names += [f"{KEPT_FOLDER}/{file.name}" for file in sorted((folder / KEPT_FOLDER).glob("*.jinja"))]
    kept = {name: (folder / name).read_text("utf-8") for name in names if (folder / name).is_file()}
    return {TOKENIZER: tokenizer.to_json(), **kept}  # with the tokens that only the other files list


def _texts_of_gguf(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> dict[str, str]:
    tokenizer = tokenizer_from_gguf(metadata)
    document = json.loads(tokenizer.to_json())
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    settings: dict[str, Any] = {name: tokenizer.token_text(i) for name, i in named.items() if i is not None}
    if tokenizer.add_bos:
        document["post_processor"] = _bos_first(settings["bos_token"], tokenizer.bos_id)
    templates = chat_templates_from_gguf(metadata)
    if set(templates) == {"default"}:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.config.max_position,
    }
    return {TOKENIZER: _json(document, indent=None), TOKENIZER_CONFIG: _json(settings)}


def _bos_first(text: str, token_id: int | None) -> dict[str, Any]:
    bos, first, second = (
        {"SpecialToken": {"id": text, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    )
    special = {text: {"id": text, "ids": [token_id], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": [bos, first], "pair": [bos, first, second], "special_tokens": special}


def _with_mask(files: Mapping[str, str], mask_id: int, where: str) -> dict[str, str]:
    document = json.loads(files[TOKENIZER])
    entry = {"content": MASK, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    if MASK not in {token["content"] for token in document["added_tokens"]}:
        document["added_tokens"].append({"id": mask_id, **entry})
    text = _json(document, indent=None)
    found = tokenizers.Tokenizer.from_str(text)
    # the library gives ids by its own rules, whatever the file says
    if found.token_to_id(MASK) != mask_id or found.id_to_token(mask_id) != MASK:
        raise ModelError(
            f"{where}: the mask {MASK} should be token {mask_id}, the first without a meaning, but the tokenizer makes it "
            f"{found.token_to_id(MASK)}: it has a token of that name, or a gap in its ids."
        )
    changed = {TOKENIZER: text}
    settings = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
    if isinstance(settings.get("added_tokens_decoder"), dict):
        settings["added_tokens_decoder"][str(mask_id)] = entry
        changed[TOKENIZER_CONFIG] = _json(settings)
    return {**files, **changed}


def _json(document: Mapping[str, Any], indent: int | None = 2) -> str:
    return json.dumps(document, indent=indent, ensure_ascii=False) + "\n"
