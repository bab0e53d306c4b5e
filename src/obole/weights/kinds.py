"""The tensor encodings of GGUF by their numbers, and how many bytes a row takes. Source: the GGUF specification."""

from __future__ import annotations

from obole.kernels.formats import BLOCKS

# Every number that a GGUF file may hold, so that a type without support is still refused by its name.
GGML_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


def row_bytes(kind: str, elements: int) -> int:
    """Bytes of a row of `elements`. Raises `ValueError` if they do not fill whole blocks."""
    block = BLOCKS[kind]
    if elements % block.elements:
        raise ValueError(f"{elements} elements do not fill whole blocks of {block.elements}")
    return elements // block.elements * block.size
