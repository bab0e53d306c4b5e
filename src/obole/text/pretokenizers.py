"""How byte-level vocabularies split text before merging: one row for each name in `tokenizer.ggml.pre`.

A GGUF file holds the vocabulary and the merges, but only the *name* of the rest. The rows repeat the `tokenizer.json`
of the models that the names stand for. A wrong row gives fluent, worse answers that nobody can see, so names that are
not listed are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LETTERS_AND_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_LETTERS_AND_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_LETTERS_AND_CONTRACTIONS}|\p{{N}}|{_REST}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """`pattern`: the regular expression that cuts words out; None: GPT-2's own, built into the byte-level step.

    `digits`: every digit apart, before that. `nfc`: Unicode normalisation form C first. `ignore_merges`: a word that
    is a token is taken whole. `add_bos`: what holds if the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def steps(self) -> dict[str, Any]:
        """The `pre_tokenizer` entry of a `tokenizer.json`."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            steps.append({"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False})
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": self.pattern is None})
        return {"type": "Sequence", "pretokenizers": steps}


_GPT2 = PreTokenizer()
_STARCODER = PreTokenizer(digits=True)
_QWEN2 = PreTokenizer(pattern=QWEN2, nfc=True)
_LLAMA3 = PreTokenizer(pattern=LLAMA3, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "command-r": PreTokenizer(digits=True, nfc=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
