"""Negative log-likelihood of real text: obole on a quantised file against transformers in fp32 on the dequantised weights.

    pip install 'obole[dev]'
    python benchmarks/quality.py MODEL.gguf [--tokens 4000] [--kv-dtype float32 bfloat16 int8 fp8] [--peer-bin DIR]

English, Python and French in equal parts. Prints the means (natural log) and their relative differences, for each format of
cached keys and values that is named, from the second one on also the difference from the first. With --peer-bin,
also what llama.cpp's arithmetic costs on the same file: `llama-perplexity` on it against the same program on a copy with
the weights dequantised to F32 (both over chunks of 512 tokens, so only the difference compares with the one above).
transformers and that copy need several times the file in memory and on disk.
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from obole import Engine

try:
    import transformers
except ImportError:
    raise SystemExit("quality.py compares with transformers, which is not installed: pip install 'obole[dev]'.") from None

HERE = Path(__file__).resolve().parent


def sample_texts() -> dict[str, str]:
    return {
        "English": (HERE.parent / "LICENSE").read_text(),
        "Python": inspect.getsource(json.decoder) + inspect.getsource(argparse),
        "French": (HERE / "texts" / "french.txt").read_text(),
    }


def reference_nll(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


def peer_nll(folder: Path, model: Path, text: Path) -> float:
    """Natural log of llama-perplexity's final estimate."""
    command = [folder / "llama-perplexity", "-m", model, "-f", text, "-c", "512", "-t", "2"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"llama-perplexity printed no estimate: {done.stderr[-300:]}")
    return math.log(float(found[1]))


def compare_peer(folder: Path, model: Path, text: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        sample, copy = Path(scratch) / "sample.txt", Path(scratch) / "f32.gguf"
        sample.write_text(text)
        subprocess.run(
            [str(folder / "llama-quantize"), "--allow-requantize", str(model), str(copy), "F32"],
            capture_output=True,
            check=True,
        )
        own, exact = peer_nll(folder, model, sample), peer_nll(folder, copy, sample)
    print(f"llama.cpp  {own:.5f}  on the same weights in F32 {exact:.5f}  difference {100 * (own / exact - 1):+.3f} %")


def own_nll(path: Path, kv_dtype: str, samples: dict[str, list[int]]) -> dict[str, float]:
    with Engine(path, kv_dtype=kv_dtype) as engine:
        print(f"{path.name}, {engine.info.kernels}, keys and values in {engine.info.kv_dtype}")
        return mean({name: engine.score(ids)[0].nll for name, ids in samples.items()}, samples)


def mean(results: dict[str, float], samples: dict[str, list[int]]) -> dict[str, float]:
    weights = {name: len(ids) - 1 for name, ids in samples.items()}
    return {**results, "all": sum(results[name] * n for name, n in weights.items()) / sum(weights.values())}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--tokens", type=int, default=4000)
    arguments.add_argument("--kv-dtype", nargs="+", default=["auto"])
    arguments.add_argument("--peer-bin", type=Path)
    options = arguments.parse_args()
    path: Path = options.model
    share = options.tokens // 3
    with Engine(path) as engine:
        samples = {
            name: engine.tokenizer.encode(text, special=False, bos=True)[:share] for name, text in sample_texts().items()
        }
        cut = "\n\n".join(engine.tokenizer.decode(ids) for ids in samples.values())
    ours = {kv_dtype: own_nll(path, kv_dtype, samples) for kv_dtype in options.kv_dtype}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    reference = mean({name: reference_nll(model, ids) for name, ids in samples.items()}, samples)
    del model
    first = ours[options.kv_dtype[0]]
    for kv_dtype, results in ours.items():
        for name, nll in results.items():
            count = len(samples[name]) if name in samples else sum(map(len, samples.values()))
            beside = "" if results is first else f"  from {options.kv_dtype[0]} {100 * (nll / first[name] - 1):+.3f} %"
            print(
                f"{kv_dtype:8} {name:8} {count:5} tokens  obole {nll:.5f}  fp32 {reference[name]:.5f}  "
                f"difference {100 * (nll / reference[name] - 1):+.3f} %{beside}"
            )
    if options.peer_bin is not None:
        compare_peer(options.peer_bin, path, cut)


if __name__ == "__main__":
    main()
