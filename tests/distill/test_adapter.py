"""Adapters: nothing changes but at masks, nothing else is trained, and what is stored comes back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from distill.test_model import causal, random_ids, tiny
from fakes.checkpoints import ARCHITECTURES
from obole.config import MultiToken
from obole.distill.adapter import FILE, adapter_facts, adapter_tensors, add_adapters, load_adapters
from obole.distill.export import export
from obole.distill.model import Decoder, load_decoder
from obole.errors import ModelError
from obole.weights.checkpoint import open_checkpoint
from obole.weights.mapped import read_json

LENGTH = 12
MASKS = torch.zeros(LENGTH, dtype=torch.bool)
MASKS[[5, 6, 11]] = True


def trained(decoder: Decoder, rank: int = 4, alpha: float = 8.0) -> Decoder:
    """With adapters that have an effect."""
    add_adapters(decoder, rank, alpha, seed=0)
    generator = torch.Generator().manual_seed(2)
    for tensor in adapter_tensors(decoder).values():
        tensor.normal_(0.0, 0.2, generator=generator)
    return decoder


def logits(decoder: Decoder, masks: torch.Tensor | None) -> torch.Tensor:
    allow = causal(LENGTH)
    allow[:, MASKS] = torch.eye(LENGTH, dtype=torch.bool)[:, MASKS]  # nobody else sees a mask
    with torch.no_grad():
        return decoder(random_ids(LENGTH), torch.arange(LENGTH), allow, masks=masks)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_masks_are_changed(arch):
    expected = logits(tiny(arch), None)
    decoder = trained(tiny(arch))
    assert torch.equal(logits(decoder, None), expected)
    assert torch.equal(logits(decoder, torch.zeros_like(MASKS)), expected)
    found = logits(decoder, MASKS)
    assert torch.equal(found[:, ~MASKS], expected[:, ~MASKS])
    assert ((found - expected)[:, MASKS].abs().amax(-1) > 1e-3).all()


def test_new_adapters_have_no_effect_and_are_drawn_from_their_seed():
    decoder = tiny()
    expected = logits(decoder, None)
    drawn = []
    for seed in (1, 1, 2):
        add_adapters(decoder, 4, 8.0, seed)
        drawn.append(adapter_tensors(decoder)["model.layers.1.mlp.down_proj.lora_A"])
        assert torch.equal(logits(decoder, MASKS), expected)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_adapters_only(checkpointing):
    decoder = trained(tiny())
    decoder.checkpointing = checkpointing
    decoder(random_ids(LENGTH), torch.arange(LENGTH), causal(LENGTH), masks=MASKS).logsumexp(-1).sum().backward()
    with_gradient = {name for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in decoder.named_parameters() if ".adapter." in name}
    assert len(with_gradient) == 2 * 4 * decoder.config.num_layers
    assert all(p.grad.abs().max() > 0 for name, p in decoder.named_parameters() if name in with_gradient)


def test_what_is_added_is_a_product_of_low_rank():
    decoder = trained(tiny(), rank=4, alpha=8.0)
    product = decoder.layers[0].mlp.down
    stored = adapter_tensors(decoder)
    up, down = (stored[f"model.layers.0.mlp.down_proj.lora_{x}"] for x in "BA")
    x = torch.randn(1, 3, product.weight.shape[1], generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        added = product(x, torch.tensor([1])) - product(x, None)
    assert (added[0, 1] - (up @ down @ x[0, 1]) * 8.0 / 4).abs().max() < 1e-4
    assert set(added[0, [0, 2]].flatten().tolist()) == {0.0}


def test_stored_adapters_come_back_beside_unchanged_weights(tmp_path):
    decoder = trained(tiny())
    export(decoder, {}, tmp_path / "out", multi_token=MultiToken(127, 16))
    facts = read_json(tmp_path / "out" / "config.json")["multi_token"].pop("adapter")
    assert facts == adapter_facts(decoder) == {"file": FILE, "rank": 4, "alpha": 8.0}
    loaded = load_decoder(open_checkpoint(tmp_path / "out"))
    assert adapter_facts(loaded) is None
    assert torch.equal(logits(loaded, MASKS), logits(tiny(), MASKS))
    load_adapters(loaded, load_file(tmp_path / "out" / FILE), facts["alpha"])
    assert torch.equal(logits(loaded, MASKS), logits(decoder, MASKS))
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in decoder.parameters()]


def test_adapters_of_another_model_are_refused():
    tensors = adapter_tensors(trained(tiny()))
    with pytest.raises(ModelError, match="do not fit the model"):
        load_adapters(tiny(num_layers=3), tensors, 8.0)
    mixed = tensors | {"model.layers.0.mlp.down_proj.lora_A": torch.zeros(5, 96)}
    with pytest.raises(ModelError, match=r"of one rank, not of \[4, 5\]"):
        load_adapters(tiny(), mixed, 8.0)
