"""Negative log-likelihood of real text: obole on a quantised file against transformers in fp32 on the dequantised weights.

    pip install 'obole[dev]'
    python benchmarks/quality.py MODEL.gguf [--tokens 1000]

Prints both means (natural log) and their relative difference. transformers needs several times the file in memory.
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
from pathlib import Path

import torch

from obole import Engine

try:
    import transformers
except ImportError:
    raise SystemExit("quality.py compares with transformers, which is not installed: pip install 'obole[dev]'.") from None


def sample_text() -> str:
    """English (this project's licence) and Python (the standard library's JSON decoder)."""
    licence = Path(__file__).resolve().parent.parent / "LICENSE"
    return licence.read_text()[:4000] + "\n\n" + inspect.getsource(json.decoder)


def reference_nll(path: Path, ids: list[int]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--tokens", type=int, default=1000)
    options = arguments.parse_args()
    with Engine(options.model) as engine:
        ids = engine.tokenizer.encode(sample_text(), special=False, bos=True)[: options.tokens]
        ours = engine.score(ids)[0].nll
        kernels = engine.info.kernels
    reference = reference_nll(options.model, ids)
    print(f"{options.model.name}: {len(ids)} tokens, {kernels}")
    print(f"obole {ours:.5f}  transformers fp32 {reference:.5f}  difference {100 * (ours / reference - 1):+.3f} %")


if __name__ == "__main__":
    main()
