"""Gradient checkpointing: the same gradients bit by bit, of packed rows too, from a second pass through each layer.

Mutations that must fail here: the second pass over rows that run on into each other; layers that keep everything.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.errors import ConfigError
from rlhf_core.models.batching import collate
from rlhf_core.models.checkpointing import checkpoint_layers
from rlhf_core.models.forward import token_outputs
from tests.tiny import tiny_model

PROMPTS, RESPONSES = [[1, 70], [1, 71, 72, 73], [5]], [[80, 81, 2], [82, 83, 84, 85, 86, 4], [87, 88]]
BATCH = collate(PROMPTS, RESPONSES, range(3), pad_id=0, device=torch.device("cpu"))


def gradients(model: Any, precision: str) -> list[Tensor]:
    outputs = token_outputs(model, BATCH, temperature=0.7, logits_chunk_tokens=8, precision=precision, critic=None)
    (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("precision", ["float32", "bf16-autocast"])
def test_gradients_are_the_same_bit_by_bit_from_layers_that_run_twice(precision: str) -> None:
    plain, model = tiny_model().eval(), tiny_model().eval()
    checkpoint_layers(model, "recompute")
    runs: list[Any] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
    expected, found = gradients(plain, precision), gradients(model, precision)
    assert len(runs) == 2 + 2  # two of the probe that packing runs once, and the pass and its repetition
    assert len(expected) == len(found) > 10
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_frozen_embeddings_stay_frozen_and_no_dropout_is_turned_on() -> None:
    model = tiny_model().eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    checkpoint_layers(model, "recompute")
    gradients(model, "float32")
    assert model.get_input_embeddings().weight.grad is None
    assert [type(m).__name__ for m in model.modules() if m.training] == ["LlamaDecoderLayer"] * len(model.model.layers)


def test_offload_needs_a_gpu_and_none_changes_nothing() -> None:
    model = tiny_model().eval()
    with pytest.raises(ConfigError, match=r"offload.*set it to recompute or none"):
        checkpoint_layers(model, "offload")
    checkpoint_layers(model, "none")
    assert not any(module.training for module in model.modules())
