"""The trainable decoder: logits against transformers, columns in any order, gradients, and the mask's row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fakes.checkpoints import ARCHITECTURES, random_weights, tiny_config, write_gguf, write_hf
from obole.config import ModelConfig
from obole.distill.model import INITIAL_DEVIATION, Decoder, add_mask_token, load_decoder, plain
from obole.errors import ModelError
from obole.weights.checkpoint import open_checkpoint
from obole.weights.layout import expected_shapes
from parity.test_transformers import CASES, COMMON

LENGTH = 100  # past the original RoPE length of 64, and several sliding windows


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1]
    with torch.no_grad():
        return decoder(ids, torch.arange(length), causal(length))


def random_ids(length: int, batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny(arch: str = "llama", **overrides: Any) -> Decoder:
    """Weights far enough from zero for attention to be uneven, and norms away from one."""
    decoder = plain(tiny_config(arch, **overrides), 0)
    generator = torch.Generator().manual_seed(1)
    for name, view in decoder.tensors().items():
        view.normal_(0.0, 0.2, generator=generator).add_(1.0 if "norm" in name else 0.0)
    return decoder


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, tmp_path):
    make, extra = CASES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**{**COMMON, **extra}), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # norms at exactly 1 and biases at 0 would hide mistakes
            parameter.normal_(0.0, 0.05 if "embed" in parameter_name else 0.1)
            if "norm" in parameter_name and not name.startswith("gemma3"):
                parameter.add_(1.0)
    model.save_pretrained(tmp_path)
    # the base of "dynamic" follows the length of the text in transformers, and is that of the original length here
    ids = random_ids(60 if "dynamic" in name else LENGTH)
    with torch.no_grad():
        expected = model(ids).logits
    assert expected.abs().max() > 0.5
    assert (logits(load_decoder(open_checkpoint(tmp_path)), ids) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_gguf_file_and_a_folder_of_the_same_weights_are_the_same_model(arch, tmp_path):
    config = tiny_config(arch)
    weights = random_weights(config)
    folder = open_checkpoint(write_hf(tmp_path / "folder", config, weights))
    file = open_checkpoint(write_gguf(tmp_path / "file.gguf", config, weights))
    ids = random_ids(20)
    assert torch.equal(logits(load_decoder(folder), ids), logits(load_decoder(file), ids))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_columns_may_stand_in_any_order(arch):
    decoder, ids = tiny(arch), random_ids(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        shuffled = decoder(ids[:, order], order, causal(40)[order][:, order])
    assert (shuffled - logits(decoder, ids)[:, order]).abs().max() < 1e-4


def test_only_wanted_columns_are_computed_and_may_repeat():
    decoder, ids = tiny(), random_ids(12)
    wanted = torch.tensor([7, 2, 7])
    with torch.no_grad():
        found = decoder(ids, torch.arange(12), causal(12), wanted)
    assert found.shape == (2, 3, 128)
    assert found.dtype == torch.float32
    assert (found - logits(decoder, ids)[:, wanted]).abs().max() < 1e-5


def test_what_is_not_allowed_is_not_seen():
    decoder, ids = tiny(), random_ids(12)
    allow = causal(12)
    allow[8:, 3] = False
    other = ids.clone()
    other[:, 3] = 5
    with torch.no_grad():
        one, two = (decoder(x, torch.arange(12), allow) for x in (ids, other))
        # columns 4 to 7 carry it on
        allow[4:, 3:8] &= torch.eye(12, dtype=torch.bool)[4:, 3:8]
        three, four = (decoder(x, torch.arange(12), allow) for x in (ids, other))
    assert not torch.equal(one[:, 8:], two[:, 8:])
    assert torch.equal(three[:, 4:], four[:, 4:])
    assert not torch.equal(three[:, 3], four[:, 3])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_reach_every_parameter_and_checkpointing_changes_none(arch):
    decoder, ids = tiny(arch), random_ids(10)
    found: list[list[torch.Tensor]] = []
    for checkpointing in (False, True):
        decoder.checkpointing = checkpointing
        decoder.zero_grad()
        decoder(ids, torch.arange(10), causal(10)).logsumexp(-1).sum().backward()
        found.append([parameter.grad.clone() for parameter in decoder.parameters()])
    assert all(gradient.abs().max() > 0 for gradient in found[0] if gradient.ndim > 1)
    assert all(map(torch.equal, *found))


def test_gradients_are_those_of_finite_differences():
    decoder = tiny("gemma3", num_layers=2, sliding_layers=(True, False), sliding_window=3)
    ids, allow, positions = random_ids(6, batch=1), causal(6), torch.tensor([0, 1, 2, 2, 3, 4])
    allow[5, 2] = False

    def loss() -> torch.Tensor:
        return decoder(ids, positions, allow).double().logsumexp(-1).sum()

    loss().backward()
    for parameter in (decoder.embedding.weight, decoder.layers[0].attention.qkv.weight, decoder.layers[1].mlp_norm.weight):
        place = parameter.grad.abs().argmax()
        flat, step = parameter.data.view(-1), 1e-2
        before, sides = flat[place].item(), []
        for side in (step, -step):
            flat[place] = before + side
            sides.append(loss().item())
        flat[place] = before
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(parameter.grad.view(-1)[place].item(), rel=1e-2)


def test_bfloat16_weights_and_autocast_come_close():
    decoder, ids = tiny(), random_ids(12)
    expected = logits(decoder, ids)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = logits(decoder, ids)
    halved = logits(decoder.to(torch.bfloat16), ids)
    for found in (mixed, halved):
        assert found.dtype == torch.float32
        assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensors_are_those_that_a_checkpoint_has_and_views(arch):
    config = tiny_config(arch, **({"attention_bias": True, "output_bias": True, "mlp_bias": True} if arch == "llama" else {}))
    decoder = plain(config, 0)
    assert {name: tuple(view.shape) for name, view in decoder.tensors().items()} == expected_shapes(config)
    for i, view in enumerate(decoder.tensors().values()):
        view.fill_(i)
    assert [view.unique().item() for view in decoder.tensors().values()] == list(range(len(decoder.tensors())))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == sum(v.numel() for v in decoder.tensors().values())


def test_a_plain_model_is_drawn_from_its_seed():
    config = tiny_config("qwen2")
    one, same, other = (plain(config, seed).tensors() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    name = "model.layers.1.mlp.{}_proj.weight"
    assert not torch.equal(one[name.format("up")], other[name.format("up")])
    assert one[name.format("up")].std() == pytest.approx(INITIAL_DEVIATION, rel=0.05)
    assert one[name.format("down")].std() == pytest.approx(INITIAL_DEVIATION / 2, rel=0.05)  # two layers
    assert set(one["model.norm.weight"].tolist()) == {1.0}
    assert set(one["model.layers.0.self_attn.q_proj.bias"].tolist()) == {0.0}


@pytest.mark.parametrize("tied", [True, False])
def test_the_mask_gets_a_row_of_its_own(tied):
    decoder = tiny(tie_embeddings=tied)
    before = {name: view.clone() for name, view in decoder.tensors().items()}
    expected = logits(decoder, random_ids(8))
    add_mask_token(decoder, 128, seed=0)
    after = decoder.tensors()
    assert decoder.config.vocab_size == 129
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        assert torch.equal(after[name][:128], before[name])
        deviation = before[name].std()
        assert 0 < (after[name][128] - before[name].mean(0)).abs().max() < 0.1 * deviation
    assert (logits(decoder, random_ids(8))[..., :128] - expected).abs().max() < 1e-5
    assert all(parameter.requires_grad for parameter in decoder.parameters())


def test_a_spare_row_becomes_the_mask():
    decoder = tiny(tie_embeddings=False)
    before = {name: view.clone() for name, view in decoder.tensors().items()}
    embedding = decoder.embedding.weight
    add_mask_token(decoder, 120, seed=0)
    assert decoder.config == tiny_config("llama")
    assert decoder.embedding.weight is embedding
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        changed = (decoder.tensors()[name] != before[name]).any(-1)
        assert changed.nonzero().flatten().tolist() == [120]
        assert (decoder.tensors()[name][120] - before[name][:120].mean(0)).abs().max() < 0.1


@pytest.mark.parametrize("mask_id", [129, 0, -1])
def test_a_mask_without_a_row_is_refused(mask_id):
    with pytest.raises(ModelError, match=f"cannot be token {mask_id}: the model has rows for 128 tokens"):
        add_mask_token(tiny(), mask_id, seed=0)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [({"attention_softcap": 50.0}, "soft-capped attention"), ({"architecture": "mamba"}, "architecture 'mamba'")],
)
def test_what_cannot_be_trained_is_refused(overrides, problem):
    with pytest.raises(ModelError, match=f"A model with {problem} cannot be trained"):
        Decoder(ModelConfig(**{**{f: getattr(tiny_config("llama"), f) for f in ModelConfig.__slots__}, **overrides}))
