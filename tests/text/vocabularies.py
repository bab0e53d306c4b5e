"""Small vocabularies trained on the spot, as the `tokenizers` library holds them and as GGUF metadata."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.text.nasty_texts import HAND_MADE, random_texts

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<think>")


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# name in the file -> normaliser, pre-tokenizer, whether whole words that are tokens are taken whole
KINDS: dict[str, tuple[Any, pre_tokenizers.PreTokenizer, bool]] = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    "smollm": (None, digits(), False),
    "command-r": (normalizers.NFC(), digits(), False),
    "qwen2": (normalizers.NFC(), split(QWEN2), False),
    "llama-bpe": (None, split(LLAMA3), True),
}


def byte_level(pre: str, size: int = 900) -> Tokenizer:
    """A byte-level BPE vocabulary of the kind that a name in `tokenizer.ggml.pre` stands for."""
    normalizer, pre_tokenizer, whole = KINDS[pre]
    made = Tokenizer(models.BPE(ignore_merges=whole))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*HAND_MADE, *random_texts(300, seed=1)], trainer)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return made


def gguf_metadata(made: Tokenizer, pre: str | None, **changes: Any) -> dict[str, Any]:
    """What a converter writes for a byte-level tokenizer."""
    vocabulary = sorted(made.get_vocab().items(), key=lambda item: item[1])
    added = {i: token.special for i, token in made.get_added_tokens_decoder().items()}
    merges = json.loads(made.to_str())["model"]["merges"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [1 if i not in added else 3 if added[i] else 4 for _, i in vocabulary],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(size: int = 900, **changes: Any) -> dict[str, Any]:
    """A SentencePiece BPE vocabulary with byte fallback: control tokens, bytes, user-defined tokens, then pieces by score."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(
        [text.replace("\u2581", "") for text in HAND_MADE[:40]],
        trainers.BpeTrainer(vocab_size=size, show_progress=False),
    )
    ordered = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    pieces = [token for token, _ in ordered if len(token) > 1] + [token for token, _ in ordered if len(token) == 1]
    user = ["\n\n", "\n\n\n", "<table>"]
    head = ["<unk>", "<s>", "</s>", "<start_of_turn>"] + [f"<0x{byte:02X}>" for byte in range(256)] + user
    # control bytes, emoji and Hebrew are left to the byte tokens
    rare = {chr(code) for code in [*range(9), *range(11, 32), 127, *range(0x590, 0x5FF), *range(0x10000, 0x20000)]}
    pieces = [piece for piece in pieces if piece not in head and rare.isdisjoint(piece)]
    types = [2, 3, 3, 3] + [6] * 256 + [4] * len(user) + [1] * len(pieces)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": head + pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-1000.0] * len(head) + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_ids(text: str, tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[int]:
    """SentencePiece's own algorithm on a text with visible spaces: join the pair of the best score, leftmost first."""
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (1, 4)}
    symbols: list[str | None] = list(text)
    after = list(range(1, len(symbols) + 1))
    before = list(range(-1, len(symbols) - 1))
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < len(symbols):
            joined = f"{symbols[left]}{symbols[right]}"
            if joined in ids:
                heapq.heappush(queue, (-scores[ids[joined]], left, right, joined))

    for place in range(len(symbols) - 1):
        offer(place, place + 1)
    while queue:
        _, left, right, joined = heapq.heappop(queue)
        if symbols[left] is None or symbols[right] is None or f"{symbols[left]}{symbols[right]}" != joined:
            continue
        symbols[left], symbols[right] = joined, None
        after[left] = after[right]
        if after[right] < len(symbols):
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    found: list[int] = []
    for symbol in symbols:
        if symbol is None:
            continue
        if symbol in ids:
            found.append(ids[symbol])
        else:
            found += [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return found
