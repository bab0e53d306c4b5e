"""The default model's tokenizer, and grammars for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from obole.text.gguf_tokenizer import tokenizer_from_gguf
from obole.text.grammar import GrammarCompiler
from obole.text.tokenizer import Tokenizer
from obole.weights.gguf import read_gguf
from tests.text.grammars import Walker, compiler_of


@pytest.fixture(scope="session")
def default_tokenizer(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_from_gguf(read_gguf(default_model_path).metadata, tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="session")
def default_compiler(default_tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    yield from compiler_of(default_tokenizer)


@pytest.fixture(scope="session")
def default_walker(default_tokenizer: Tokenizer) -> Walker:
    return Walker(default_tokenizer)
