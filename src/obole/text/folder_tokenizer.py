"""Tokenizers from a checkpoint folder: `tokenizer.json` and the files that go with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from obole.errors import ModelError
from obole.text.added_tokens import AddedToken
from obole.text.tokenizer import SPACE_MARK, Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_folder(path: Path, mask_id: int | None = None) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder; None if the folder has no `tokenizer.json`.

    Control tokens are those that `tokenizer.json` or `tokenizer_config.json` flag as special, and those that
    `tokenizer_config.json` or `special_tokens_map.json` name (`eos_token`, ..., `additional_special_tokens`). `mask_id`: the
    token that no text becomes, if there is one.
    Raises `ModelError` for files that are damaged or contradict each other, and for kinds that are not supported.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file} is not a tokenizer that can be read ({error}): fetch the file again.") from error
    backend.no_truncation()  # a prompt is never cut in silence
    backend.no_padding()
    config = read_json(path / "tokenizer_config.json")
    names = read_json(path / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    _add_listed(backend, config, path)
    _add_named(backend, names)
    byte_level, strip_space = _decoding(backend, file)
    ids = {name: _id(backend, names.get(name)) for name in _NAMED}
    return Tokenizer(
        backend,
        added=[_added(i, token) for i, token in sorted(backend.get_added_tokens_decoder().items())],
        vocab_size=_vocab_size(backend),
        byte_level=byte_level,
        bos_id=ids["bos_token"],
        eos_id=ids["eos_token"],
        unk_id=_id(backend, getattr(backend.model, "unk_token", None)),
        pad_id=ids["pad_token"],
        add_bos=_adds_bos(backend, config, ids["bos_token"]),
        strip_space=strip_space,
        later_pre_tokenizer=_later_pre_tokenizer(backend),
        mask_id=mask_id,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file. Raises `ModelError` if it is something else."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch the file again.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(found).__name__}.")
    return found


def _add_listed(backend: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> None:
    """Tokens that only `tokenizer_config.json` lists, and flags that it states otherwise."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise ModelError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder must be an object.")
    known = backend.get_added_tokens_decoder()
    try:
        wanted = sorted((int(key), entry) for key, entry in listed.items())
        for i, entry in wanted:
            if i in known and known[i].content == entry["content"]:
                continue
            token = tokenizers.AddedToken(
                entry["content"],
                single_word=entry.get("single_word", False),
                lstrip=entry.get("lstrip", False),
                rstrip=entry.get("rstrip", False),
                normalized=entry.get("normalized", not entry.get("special", False)),
                special=entry.get("special", False),
            )
            backend.add_tokens([token])
            if backend.token_to_id(entry["content"]) != i:
                raise ModelError(
                    f"{path / 'tokenizer_config.json'} gives {entry['content']!r} the id {i}, tokenizer.json "
                    f"{backend.token_to_id(entry['content'])}: the files are not of one model."
                )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder is damaged ({error!r}).") from error


def _add_named(backend: tokenizers.Tokenizer, names: dict[str, Any]) -> None:
    """Flag the tokens that the configuration names as control tokens, keeping their other flags."""
    extra = names.get("additional_special_tokens") or []
    wanted = [_text(names.get(name)) for name in _NAMED]
    wanted += [_text(token) for token in extra] if isinstance(extra, list) else []
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in wanted:
        if text is None or backend.token_to_id(text) is None:
            continue
        token = known.get(text) or tokenizers.AddedToken(text, normalized=False)
        if not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _text(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _id(backend: tokenizers.Tokenizer, token: object) -> int | None:
    text = _text(token)
    found: int | None = None if text is None else backend.token_to_id(text)
    return found


def _added(i: int, token: tokenizers.AddedToken) -> AddedToken:
    return AddedToken(
        id=i,
        text=token.content,
        control=token.special,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )


def _vocab_size(backend: tokenizers.Tokenizer) -> int:
    size: int = backend.get_vocab_size()
    if backend.id_to_token(size - 1) is None:  # the ids have gaps
        size = 1 + max(backend.get_vocab().values(), default=-1)
    return size


def _adds_bos(backend: tokenizers.Tokenizer, config: dict[str, Any], bos_id: int | None) -> bool:
    stated = config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def _state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


def _steps(state: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """The steps of a pre-tokenizer or decoder, sequences unfolded."""
    if state.get("type") == "Sequence":
        for step in state[key]:
            yield from _steps(step, key)
    elif state:
        yield state


def _decoding(backend: tokenizers.Tokenizer, file: Path) -> tuple[bool, bool]:
    """Whether tokens spell bytes in GPT-2's alphabet, and whether decoding takes a space away at the beginning."""
    steps = list(_steps(_state(backend.decoder), "decoders"))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    replaces = any(step["type"] == "Replace" and step.get("pattern") == {"String": SPACE_MARK} for step in steps)
    if "Metaspace" in kinds or replaces:
        return False, any(
            (step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
    raise ModelError(f"{file} decodes with {sorted(kinds) or 'nothing'}, and only byte-level and SentencePiece are supported.")


def _later_pre_tokenizer(backend: tokenizers.Tokenizer) -> Any:
    """The pre-tokenizer for text after a token, where the one for the first text adds a space; else None."""
    state = _state(backend.pre_tokenizer)
    spaced = [s for s in _steps(state, "pretokenizers") if s["type"] == "Metaspace" and s.get("prepend_scheme") == "first"]
    if not spaced:
        return None
    for step in spaced:
        step["prepend_scheme"] = "never"
    empty = {"version": "1.0", "added_tokens": [], "pre_tokenizer": state, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return tokenizers.Tokenizer.from_str(json.dumps(empty)).pre_tokenizer
