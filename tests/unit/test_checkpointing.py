"""Gradient checkpointing: the same gradients bit by bit, of packed rows too, from activations made a second time.

Mutations that must fail here: the second pass over rows that run on into each other; layers that keep everything;
norms that keep everything; a change that changes states kept; a rounded input taken for another one.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

from rlhf_core.errors import ConfigError
from rlhf_core.models.batching import collate
from rlhf_core.models.checkpointing import GradientCheckpointing, checkpoint_layers
from rlhf_core.models.forward import states_of_probe, token_outputs
from rlhf_core.models.packing import packable
from tests.tiny import tiny_model

PROMPTS, RESPONSES = [[1, 70], [1, 71, 72, 73], [5]], [[80, 81, 2], [82, 83, 84, 85, 86, 4], [87, 88]]
TOKENS = sum(map(len, PROMPTS + RESPONSES)) - 1  # the first one of two rows is computed once
LAYERS = tiny_model().config.num_hidden_layers
BATCH = collate(PROMPTS, RESPONSES, range(3), pad_id=0, device=torch.device("cpu"))


def gradients(model: Any, precision: str) -> list[Tensor]:
    outputs = token_outputs(model, BATCH, temperature=0.7, logits_chunk_tokens=8, precision=precision, critic=None)
    (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Calls(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        self.count[str(function)] += 1
        return function(*inputs, **(options or {}))


@pytest.mark.parametrize("how", ["selective", "recompute"])
@pytest.mark.parametrize("precision", ["float32", "bf16-autocast"])
def test_gradients_are_the_same_bit_by_bit_from_activations_made_again(
    precision: str, how: GradientCheckpointing
) -> None:
    plain, model = tiny_model().eval(), tiny_model().eval()
    checkpoint_layers(model, how, precision)
    expected, found = gradients(plain, precision), gradients(model, precision)
    assert len(expected) == len(found) > 10
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# The last of the 7 products of a layer is needed by no gradient of that layer, so it is not made again.
@pytest.mark.parametrize(("how", "products"), [("selective", 0), ("recompute", 6 * LAYERS)])
def test_what_runs_again(how: GradientCheckpointing, products: int) -> None:
    counts = []
    for one in ("none", how):
        model = tiny_model().eval()
        checkpoint_layers(model, one, "bf16-autocast")
        packable(model.model)  # it runs the model
        with Calls() as calls:
            gradients(model, "bf16-autocast")
        counts.append(calls.count)
    more = {name: counts[1][name] - counts[0][name] for name in counts[1]}
    assert more["aten.mm.default"] == products
    assert more["aten.rsqrt.default"] == 2 * LAYERS  # norms
    assert more["aten.silu.default"] == LAYERS
    assert (more["aten._scaled_dot_product_flash_attention_for_cpu.default"] > 0) == (how == "recompute")


def test_selective_keeps_half_of_a_layers_activations() -> None:
    def kept(how: GradientCheckpointing) -> int:
        model = tiny_model().eval()
        checkpoint_layers(model, how, "bf16-autocast")
        packable(model.model)
        found: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.setdefault(x.data_ptr(), x), lambda x: x):
            token_outputs(model, BATCH, temperature=0.7, logits_chunk_tokens=8, precision="bf16-autocast", critic=None)
        wide = (model.config.hidden_size, model.config.intermediate_size)
        return sum(x.nbytes for x in found.values() if x.ndim > 1 and x.shape[-2] == TOKENS and x.shape[-1] in wide)

    assert kept("selective") < 0.6 * kept("none")


def test_a_model_whose_states_would_change_is_left_alone() -> None:
    class Doubled(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = tiny_model().eval()
    model.model.layers[1].mlp.__class__ = Doubled
    before = states_of_probe(model.model, "bf16-autocast")
    checkpoint_layers(model, "selective", "bf16-autocast")
    after = states_of_probe(model.model, "bf16-autocast")
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_layer_may_write_to_the_input_of_its_products() -> None:
    class Written(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x.mul_(3))

    models = [tiny_model().eval(), tiny_model().eval()]
    for model in models:
        model.model.layers[1].mlp = Written(model.config.hidden_size)
    checkpoint_layers(models[1], "selective", "bf16-autocast")
    expected, found = (gradients(model, "bf16-autocast") for model in models)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_frozen_embeddings_stay_frozen_and_no_dropout_is_turned_on() -> None:
    model = tiny_model().eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    checkpoint_layers(model, "recompute", "float32")
    gradients(model, "float32")
    assert model.get_input_embeddings().weight.grad is None
    assert [type(m).__name__ for m in model.modules() if m.training] == ["LlamaDecoderLayer"] * len(model.model.layers)


def test_offload_needs_a_gpu_and_none_changes_nothing() -> None:
    model = tiny_model().eval()
    with pytest.raises(ConfigError, match=r"offload.*set it to recompute, selective or none"):
        checkpoint_layers(model, "offload", "float32")
    checkpoint_layers(model, "none", "float32")
    assert not any(module.training for module in model.modules())
