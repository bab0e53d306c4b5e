"""Tokenizers rebuilt from GGUF metadata, with the ids of the original.

Two kinds of vocabulary (`tokenizer.ggml.model`): "gpt2" is byte-level BPE with its merges in the file; "llama" is
SentencePiece BPE, whose merges follow from the scores. The result is what the model's `tokenizer.json` would have
built.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from blake3 import blake3

from obole.config import END_OF_TURN_TOKENS
from obole.errors import ModelError
from obole.text.added_tokens import AddedToken
from obole.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from obole.text.tokenizer import SPACE_MARK, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_KEY = "tokenizer.ggml."
_CACHE_FORMAT = 1  # part of the cache key: raise it when the same metadata shall give another tokenizer
_MARKER = re.compile(r"<\|[^|<>\s]+\|>")  # the shape of control tokens; some files list them as user-defined


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked contents of the metadata; `tokens[id]` and `types[id]`."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None


def tokenizer_from_gguf(metadata: Mapping[str, Any], cache_dir: Path | None = None) -> Tokenizer:
    """Rebuild a tokenizer from the `tokenizer.ggml.*` entries of a GGUF file.

    `cache_dir`: where to keep tokenizers that take over a second to derive (SentencePiece vocabularies); None: nowhere.
    Raises `ModelError` for a kind of tokenizer that is not known, and for metadata that contradicts itself.
    """
    kind = metadata.get(_KEY + "model")
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentencepiece(metadata, cache_dir)
    if kind is None:
        raise ModelError("The GGUF file holds no tokenizer (tokenizer.ggml.model is missing): use a file that has one.")
    raise ModelError(f"tokenizer.ggml.model is {kind!r}, and only 'gpt2' and 'llama' are supported: use another file.")


# --- byte-level BPE ---


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    rules = _pre_tokenizer(metadata)
    vocabulary = _vocabulary(metadata, default_bos=None, default_eos=None, default_unk=None)
    merges: list[tuple[str, str]] = []
    for place, merge in enumerate(_strings(metadata, "merges")):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise ModelError(f"tokenizer.ggml.merges[{place}] must be two tokens with a space between: the file is damaged.")
        merges.append((left, right))
    types = vocabulary.types
    try:
        model = tokenizers.models.BPE(
            vocab={token: i for token, i in vocabulary.ids.items() if types[i] != UNUSED},
            merges=merges,
            ignore_merges=rules.ignore_merges,
        )
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"tokenizer.ggml.merges do not fit the vocabulary ({error}): the file is damaged.") from error
    backend = _backend_of(
        normalizer={"type": "NFC"} if rules.nfc else None,
        pre_tokenizer=rules.steps(),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )
    backend.model = model
    added = _added_tokens(vocabulary)
    _register(backend, added)
    return _tokenizer(
        metadata,
        vocabulary,
        backend,
        added,
        byte_level=True,
        add_bos=_flag(metadata, "add_bos_token", rules.add_bos),
        silent=[i for i, kind in enumerate(types) if kind == UNUSED],
    )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get(_KEY + "pre")
    rules = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rules is None:
        problem = "is missing" if name is None else f"is {name!r}, which is not known"
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            f"tokenizer.ggml.pre {problem}, and a guess would give other token ids than the model was trained with: "
            f"use a file converted with one of {known}, or the model's folder with its tokenizer.json."
        )
    return rules


# --- SentencePiece BPE ---


def _sentencepiece(metadata: Mapping[str, Any], cache_dir: Path | None) -> Tokenizer:
    vocabulary = _vocabulary(metadata, default_bos=1, default_eos=2, default_unk=0)
    vocabulary = _with_space_marks(vocabulary)
    prefix = _flag(metadata, "add_space_prefix", True)
    scores = _scores(metadata, len(vocabulary.tokens))
    added = _added_tokens(vocabulary)
    cached = None if cache_dir is None else cache_dir / f"tokenizer-{_digest(vocabulary, scores, prefix)}.json"
    backend = None if cached is None else _read_cached(cached, len(vocabulary.tokens))
    if backend is None:
        backend = _build_sentencepiece(vocabulary, scores, prefix, added)
        if cached is not None:
            _write_cached(cached, backend)
    return _tokenizer(
        metadata,
        vocabulary,
        backend,
        added,
        byte_level=False,
        add_bos=_flag(metadata, "add_bos_token", True),
        strip_space=prefix,
    )


def _build_sentencepiece(
    vocabulary: _Vocabulary, scores: list[float], prefix: bool, added: list[AddedToken]
) -> tokenizers.Tokenizer:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    steps = [{"type": "Prepend", "prepend": SPACE_MARK}, replace] if prefix else [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    backend = _backend_of(
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )
    unknown = None if vocabulary.unk_id is None else vocabulary.tokens[vocabulary.unk_id]
    backend.model = tokenizers.models.BPE(
        vocab=vocabulary.ids,
        merges=merges_from_scores(vocabulary.tokens, vocabulary.types, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    _register(backend, added)
    return backend


def merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies, best first.

    Every way to cut a token into two others is a merge, ranked by the token's score; among equals the longest left part
    comes first, then the longest right part. User-defined tokens have the score 0 in SentencePiece models, whatever the
    GGUF file says. This is the order that the Hugging Face converter writes (`generate_merges`).
    """
    usable = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if token in usable:
            cost = 0.0 if kind == USER_DEFINED else -score
            size = len(token)
            for cut in range(1, size):
                left = token[:cut]
                if left in usable:
                    right = token[cut:]
                    if right in usable:
                        found.append((cost, -cut, cut - size, left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in found]


def _with_space_marks(vocabulary: _Vocabulary) -> _Vocabulary:
    """GGUF files write runs of spaces among the user-defined tokens as spaces, the original with the visible mark."""
    tokens = [
        token.replace(" ", SPACE_MARK) if kind == USER_DEFINED and not token.strip(" ") else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    return _Vocabulary(tokens, vocabulary.types, _index(tokens), vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id)


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    scores = _numbers(metadata, "scores", count)
    values = [float(score) for score in scores]
    if not all(map(math.isfinite, values)):
        raise ModelError("tokenizer.ggml.scores holds a value that is not finite: the file is damaged.")
    return values


# --- the cache of derived tokenizers ---


def _digest(vocabulary: _Vocabulary, scores: list[float], prefix: bool) -> str:
    rules = json.dumps([_CACHE_FORMAT, tokenizers.__version__, prefix, vocabulary.unk_id, len(vocabulary.tokens)])
    sizes = array("q", map(len, vocabulary.tokens)).tobytes()
    types, values = array("q", vocabulary.types).tobytes(), array("d", scores).tobytes()
    parts = (rules.encode(), sizes, types, values, "".join(vocabulary.tokens).encode())
    return blake3(b"".join(blake3(part).digest() for part in parts)).hexdigest()[:40]


def _read_cached(path: Path, size: int) -> tokenizers.Tokenizer | None:
    if not path.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # a damaged file is a miss: it is written anew
        return None
    return backend if backend.get_vocab_size() == size else None


def _write_cached(path: Path, backend: tokenizers.Tokenizer) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, delete=False, encoding="utf-8") as file:
            file.write(backend.to_str())
        os.replace(file.name, path)
    except OSError:  # a full or read-only disk costs a second at the next start, nothing else
        return


# --- common parts ---


def _vocabulary(
    metadata: Mapping[str, Any], *, default_bos: int | None, default_eos: int | None, default_unk: int | None
) -> _Vocabulary:
    tokens = _strings(metadata, "tokens")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    ids = _index(tokens)
    types = [NORMAL] * len(tokens)
    if _KEY + "token_type" in metadata:
        types = [int(kind) for kind in _numbers(metadata, "token_type", len(tokens))]
    defaults = {"bos": default_bos, "eos": default_eos, "unknown": default_unk, "eot": None, "eom": None}
    named = {name: _token_id(metadata, f"{name}_token_id", len(tokens), default) for name, default in defaults.items()}
    for name, found in named.items():
        if found is not None and types[found] not in (CONTROL, UNKNOWN, BYTE):
            types[found] = UNKNOWN if name == "unknown" else CONTROL
    for i, kind in enumerate(types):
        if kind == USER_DEFINED and (_MARKER.fullmatch(tokens[i]) or tokens[i] in END_OF_TURN_TOKENS):
            types[i] = CONTROL
    return _Vocabulary(tokens, types, ids, named["bos"], named["eos"], named["unknown"])


def _index(tokens: list[str]) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        again = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise ModelError(
            f"tokenizer.ggml.tokens holds {tokens[again]!r} twice, as {again} and {ids[tokens[again]]}: the file is damaged."
        )
    return ids


def _added_tokens(vocabulary: _Vocabulary) -> list[AddedToken]:
    return [
        AddedToken(id=i, text=token, control=kind != USER_DEFINED)
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _register(backend: tokenizers.Tokenizer, added: list[AddedToken]) -> None:
    backend.add_tokens([tokenizers.AddedToken(token.text, special=token.control, normalized=False) for token in added])


def _backend_of(
    *, normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None, decoder: dict[str, Any]
) -> tokenizers.Tokenizer:
    """A tokenizer with an empty vocabulary."""
    description: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _tokenizer(
    metadata: Mapping[str, Any],
    vocabulary: _Vocabulary,
    backend: tokenizers.Tokenizer,
    added: list[AddedToken],
    **rest: Any,
) -> Tokenizer:
    size = len(vocabulary.tokens)
    ends = {token.id for token in added if token.control and token.text in END_OF_TURN_TOKENS}
    ends |= {found for name in ("eot", "eom") if (found := _token_id(metadata, f"{name}_token_id", size, None)) is not None}
    return Tokenizer(
        backend,
        added=added,
        vocab_size=size,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        unk_id=vocabulary.unk_id,
        pad_id=_token_id(metadata, "padding_token_id", size, None),
        end_ids=ends,
        **rest,
    )


# --- reading metadata that may be damaged or hostile ---


def _entry(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(_KEY + key)
    if value is None:
        raise ModelError(f"tokenizer.ggml.{key} is missing: the file holds no usable tokenizer.")
    if hasattr(value, "tolist"):  # a numpy array
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise ModelError(f"tokenizer.ggml.{key} must be a list that is not empty, not {type(value).__name__}.")
    return list(value)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = _entry(metadata, key)
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise ModelError(f"tokenizer.ggml.{key}[{place}] must be a string, not {type(value).__name__}.")
    try:
        "".join(values).encode("utf-8")
    except UnicodeEncodeError:
        raise ModelError(f"tokenizer.ggml.{key} holds text that is not Unicode: the file is damaged.") from None
    return values


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> list[int | float]:
    values = _entry(metadata, key)
    if len(values) != count:
        raise ModelError(f"tokenizer.ggml.{key} has {len(values)} entries for {count} tokens: the file is damaged.")
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"tokenizer.ggml.{key}[{place}] must be a number, not {type(value).__name__}.")
    return values


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(_KEY + key, default)
    if not isinstance(value, bool):
        raise ModelError(f"tokenizer.ggml.{key} must be true or false, not {value!r}.")
    return value


def _token_id(metadata: Mapping[str, Any], key: str, count: int, default: int | None) -> int | None:
    value = metadata.get(_KEY + key)
    if value is None:
        return default if default is not None and default < count else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ModelError(f"tokenizer.ggml.{key} is {value!r}, which is not the id of one of the {count} tokens.")
    return value
