"""Models whose every answer is known beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes.checkpoints import (
    byte_characters,
    byte_tokenizer,
    byte_vocabulary,
    puppet_config,
    puppet_weights,
    table_logits,
    write_gguf,
)
from obole import Engine
from obole.speculate.controller import always

END = 259  # <|im_end|>
NEWLINE = 10  # the last token of a chat prompt
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def spelled(text: bytes) -> str:
    """A token as the vocabulary writes it."""
    return "".join(byte_characters()[byte] for byte in text)


def speaking(path: Path, pieces: Sequence[str | bytes], *, template: str | None = TEMPLATE, bos: bool = False) -> Path:
    """A model that answers any chat with these pieces, a token each, and then ends.

    Every other token (the bytes are 0 to 255) is followed by the end as well, unless it is a letter: after these comes the
    next one of the alphabet, from z to a.
    """
    metadata = byte_tokenizer(chat_template=template)
    base = byte_vocabulary()
    tokens = [*base, *(spelled(piece if isinstance(piece, bytes) else piece.encode()) for piece in pieces)]
    assert len(set(tokens)) == len(tokens), "each piece once"
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] += [1] * len(pieces)
    metadata["tokenizer.ggml.add_bos_token"] = bos
    table = [END] * len(tokens)
    for letter in range(26):
        table[97 + letter] = 97 + (letter + 1) % 26
    script = [NEWLINE, *range(len(base), len(tokens)), END]
    for before, after in itertools.pairwise(script):
        table[before] = after
    config = puppet_config(len(tokens), eos_ids=(END,), bos_id=257 if bos else None)
    return write_gguf(path, config, puppet_weights(config, table_logits(table)), tokenizer=metadata)


def open_speaking(folder: Path, pieces: Sequence[str | bytes], *, template: str | None = TEMPLATE, **settings: Any) -> Engine:
    """The same, loaded, with room for a few thousand tokens."""
    return Engine(speaking(folder / "puppet.gguf", pieces, template=template), **{"kv_device": 1 << 23, **settings})


def always_drafting(engine: Engine, most: int = 16) -> Engine:
    """The same engine, following every proposal: whether one pays depends on what else the machine does."""
    engine._controller.lengths = always(most)
    return engine
