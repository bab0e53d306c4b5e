"""Adapters in the engine: predictions are those of the model that was trained, and all else is as it was."""

from __future__ import annotations

import pytest
import torch

from distill.test_adapter import trained
from distill.test_model import causal, tiny
from exact.common import fingerprint
from fakes.checkpoints import ARCHITECTURES
from obole import Engine, SamplingParams
from obole.config import MultiToken
from obole.distill.adapter import FILE
from obole.distill.export import export
from obole.distill.model import Decoder, add_mask_token
from obole.errors import ModelError

PROMPT = [5, 9, 14, 3, 77, 20, 21]
MASK = 128
PLAIN = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3, mtp="off", speculate="off")
STATIC = SamplingParams(max_tokens=13, ignore_eos=True, mtp="static", mtp_tokens=4)


def by_hand(decoder: Decoder, count: int) -> list[int]:
    """Four tokens a pass, after the first."""
    tokens = list(PROMPT)
    masks = 0
    while len(tokens) < len(PROMPT) + count:
        masks = min(masks, len(PROMPT) + count - 1 - len(tokens))
        ids = torch.tensor([tokens + [MASK] * masks])
        length = ids.shape[1]
        with torch.no_grad():
            rows = decoder(ids, torch.arange(length), causal(length), masks=ids[0] == MASK)[0, -1 - masks :, :MASK]
        tokens += rows.argmax(-1).tolist()
        masks = 3
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_predictions_are_those_of_the_trained_model(arch, tmp_path):
    decoder = tiny(arch)
    add_mask_token(decoder, MASK, 0)
    export(decoder, {}, tmp_path / "before", multi_token=MultiToken(MASK, 16))
    export(trained(decoder), {}, tmp_path / "after", multi_token=MultiToken(MASK, 16))
    with Engine(tmp_path / "before") as before, Engine(tmp_path / "after") as after:
        expected, plain = (engine.generate([PROMPT], PLAIN)[0].choices[0] for engine in (before, after))
        assert fingerprint(plain) == fingerprint(expected)
        [answer] = after.generate([PROMPT], STATIC)
        assert list(answer.token_ids) == by_hand(decoder, 13)
        assert answer.token_ids != before.generate([PROMPT], STATIC)[0].token_ids
        again = after.generate([PROMPT], PLAIN)[0].choices[0]  # what masks left in the pool is overwritten
        assert fingerprint(again) == fingerprint(expected)


def test_an_adapter_that_is_missing_or_of_another_model_is_refused(tmp_path):
    decoder = tiny("llama")
    add_mask_token(decoder, MASK, 0)
    export(trained(decoder), {}, tmp_path / "model", multi_token=MultiToken(MASK, 16))
    file = tmp_path / "model" / FILE
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"layers.1.mlp.down_proj.lora_A", b"layers.9.mlp.down_proj.lora_A"))
    with pytest.raises(ModelError, match="adapter is of another model"):
        Engine(tmp_path / "model")
    file.unlink()
    with pytest.raises(ModelError, match="is missing from the folder"):
        Engine(tmp_path / "model")
