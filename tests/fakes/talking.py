"""A model that talks nonsense: random weights, so that every token depends on all before it, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

from fakes.checkpoints import byte_tokenizer, random_weights, tiny_config, write_gguf

TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_talking(path: Path, context: int = 2048) -> Path:
    """As a `.gguf` file; <|endoftext|> (257) and <|im_end|> (259) end answers."""
    config = tiny_config("llama", vocab_size=260, max_position=context, bos_id=None, eos_ids=(257, 259))
    weights = random_weights(config, seed=1, scale=0.25)
    return write_gguf(path, config, weights, tokenizer=byte_tokenizer(chat_template=TEMPLATE))
