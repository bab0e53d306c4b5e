"""Matrices made 8 bits while they are loaded: the bytes that the gguf library writes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from fakes.checkpoints import byte_tokenizer, random_weights, tiny_config, write_gguf, write_hf
from obole import Engine, SamplingParams
from obole.errors import ConfigError
from obole.kernels.formats import dequantize
from obole.types import WeightTensor
from obole.weights.quantize import quantized


def matrix(values: np.ndarray) -> WeightTensor:
    values = np.ascontiguousarray(values, dtype=np.float32)
    return WeightTensor("m.weight", "F32", values.shape, values.view(np.uint8).reshape(len(values), -1))


def test_bytes_are_those_of_ggml():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 0.05, (40, 96)).astype(np.float32)
    values[3, 32:64] = 0
    values[4, :5] = [0.5, -0.5, 63.5, -63.5, 127]  # halves
    found = quantized(matrix(values))
    assert found.kind == "Q8_0"
    assert found.shape == (40, 96)
    assert np.array_equal(found.data, gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0))
    largest = np.abs(values.reshape(40, 3, 32)).max(axis=2, keepdims=True)
    assert (np.abs(dequantize(found).reshape(40, 3, 32) - values.reshape(40, 3, 32)) <= largest / 127 * 0.6).all()


@pytest.mark.parametrize(
    "values", [np.ones((4, 40)), np.full((4, 32), np.nan), np.full((4, 32), 1e30), np.full((2, 32), np.inf)]
)
def test_what_does_not_fit_stays_as_it_is(values):
    tensor = matrix(values)
    assert quantized(tensor) is tensor


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_folder_answers_as_the_same_weights_in_a_file_of_8_bits(arch, tmp_path):
    config = tiny_config(arch, vocab_size=260)
    weights = random_weights(config)
    write_hf(tmp_path / "folder", config, weights)
    write_gguf(tmp_path / "model.gguf", config, weights, kind="Q8_0", tokenizer=byte_tokenizer())
    params = SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    with Engine(tmp_path / "folder", quantize="q8_0") as folder, Engine(tmp_path / "model.gguf") as file:
        assert folder.info.weight_bytes == file.info.weight_bytes
        assert folder.info.kv_dtype == "bfloat16"
        found, expected = (engine.generate([[5, 6, 7]], params)[0] for engine in (folder, file))
    assert found.token_ids == expected.token_ids
    assert found.choices[0].logprobs == expected.choices[0].logprobs
    with pytest.raises(ConfigError, match="quantize must be one of"):
        Engine(tmp_path / "folder", quantize="q3")
