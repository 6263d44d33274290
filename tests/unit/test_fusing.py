"""Fused norms and gated MLPs: the same numbers up to rounding, one kernel for all layers, nothing changed on failure.

Mutations that must fail here: gate and up exchanged; an MLP that does something else replaced; a failure kept quiet.
"""

import os
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from rlhf_core.models.checkpointing import checkpoint_layers
from rlhf_core.models.forward import states_of_probe
from rlhf_core.models.fusing import fuse_layers, gated, norms
from tests.tiny import tiny_model
from tests.unit.test_checkpointing import LAYERS, gradients

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler, which torch.compile needs on a CPU"
)


def fused(model: Any) -> list[bool]:
    return ["forward" in vars(module) for module in (*norms(model), *gated(model))]


@needs_compiler
@pytest.mark.parametrize("how", ["none", "selective"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bf16-autocast", 2e-2)])
def test_gradients_are_the_same_up_to_rounding(precision: str, tolerance: float, how: Any) -> None:
    plain, model = tiny_model().eval(), tiny_model().eval()
    fuse_layers(model, precision)
    checkpoint_layers(model, how, precision)
    assert fused(model) == [True] * 3 * LAYERS
    expected, found = gradients(plain, precision), gradients(model, precision)
    assert len(expected) == len(found) > 10
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@needs_compiler
def test_all_layers_share_their_kernels() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    fuse_layers(tiny_model().eval(), "float32")
    assert counters["stats"]["unique_graphs"] == 2  # a norm, a gated product


@needs_compiler
def test_an_mlp_that_does_something_else_leaves_the_model_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = tiny_model().eval()
    model.model.layers[1].mlp.__class__ = Doubled
    check_left_alone(model, caplog)


def test_a_compiler_that_fails_leaves_the_model_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*inputs: Any) -> Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    check_left_alone(tiny_model().eval(), caplog)


def check_left_alone(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = states_of_probe(model.model, "float32")
    fuse_layers(model, "float32")
    after = states_of_probe(model.model, "float32")
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)
    assert not any(fused(model))
    assert "compute.torch_compile has no effect: LlamaForCausalLM cannot be compiled" in caplog.text
