"""Gradient checkpointing: activations are made again in the backward pass instead of being kept.

Left out: the mechanism of a second pass, which is torch's and transformers' own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.forward import states_of_probe
from rlhf_core.models.fusing import gated, norms
from rlhf_core.models.packing import same_rows_again

GradientCheckpointing = Literal["none", "selective", "recompute", "offload"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_layers(model: PreTrainedModel, how: GradientCheckpointing, precision: str) -> None:
    """Let a model's layers keep less for the backward pass, and make the rest again there by a second forward pass.

    Gradients are the same bit by bit on CPUs. The model stays in eval mode: only the layers themselves, none of the
    modules within them, are marked as in training, which is what transformers asks for.

    Args:
        model: About to be trained; on its device.
        how: compute.gradient_checkpointing. none: nothing is done. selective: norms and what stands between the
            products of gated MLPs are made again, in a few percent of the time. recompute: only inputs of layers are
            kept. offload: these wait in host memory.
        precision: compute.precision.

    Raises:
        ConfigError: For offload without a GPU.
        ModelError: If the architecture does not have it.
    """
    if how == "none":
        return
    if how == "offload" and model.device.type == "cpu":
        raise ConfigError(
            "compute.gradient_checkpointing is offload, which moves activations from a GPU to host memory, but the"
            " model is on the CPU; set it to recompute, selective or none"
        )
    if how == "selective":
        _keep_products(model, precision)
        return
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": _nothing_kept}
    try:
        model.gradient_checkpointing_enable(options, offload=how == "offload")
    except ValueError as error:
        raise ModelError(f"compute.gradient_checkpointing is {how}: {error}; set it to none") from None
    model.disable_input_require_grads()  # for torch's other mechanism; it would make frozen embeddings learn
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _nothing_kept() -> Contexts:
    """Return the contexts of a layer's pass and of its second pass."""
    return nullcontext(), same_rows_again()


def _keep_products(model: PreTrainedModel, precision: str) -> None:
    """Let modules within a model's layers keep less, where that leaves its states the same bit by bit."""
    base: Any = model.base_model
    before = states_of_probe(base, precision)
    changed = [(module, vars(module).get("forward")) for module in _lighter(base)]
    for module, _ in changed:
        module.forward = _lighter_forward(module)
    after = states_of_probe(base, precision)
    if before is None or after is None or not torch.equal(before, after):
        for module, forward in changed:
            del module.forward
            if forward is not None:
                module.forward = forward


def _lighter(model: nn.Module) -> list[nn.Module]:
    """Linear layers, and the norms and gated MLPs that the compiler has not made lighter already."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    linear = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
    return linear + [module for module in (*norms(model), *gated(model)) if "forward" not in vars(module)]


def _lighter_forward(module: Any) -> Callable[[Tensor], Tensor]:
    forward: Callable[[Tensor], Tensor] = module.forward
    if type(module) is nn.Linear:
        return lambda hidden: forward(_rounded_once(hidden))
    if hasattr(module, "gate_proj"):  # down(act(gate(x)) * up(x)), which keeps gate(x) and up(x) alone

        def last(gate: Tensor, up: Tensor) -> Tensor:
            found: Tensor = module.down_proj(module.act_fn(gate) * up)
            return found

        return lambda hidden: _made_again(last, module.gate_proj(hidden), module.up_proj(hidden))
    return lambda hidden: _made_again(forward, hidden)  # a norm, which keeps its input alone


def _made_again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*inputs)
    found: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return found


def _rounded_once(hidden: Tensor) -> Tensor:
    """What autocast makes of the input of a linear layer, kept once for all layers with that input."""
    device = hidden.device.type
    if not (torch.is_grad_enabled() and torch.is_autocast_enabled(device) and hidden.dtype == torch.float32):
        return hidden
    found: Tensor = _Rounded.apply(hidden, torch.get_autocast_dtype(device))
    return found


class _Rounded(torch.autograd.Function):
    """A cast whose results share their memory, while gradients of each are added up in the input's dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, dtype: torch.dtype) -> Tensor:
        version, found = getattr(hidden, "rounded", (None, hidden))
        if version != hidden._version:  # nor may it have been written to since
            found = hidden.to(dtype)
            hidden.rounded = hidden._version, found
        rounded: Tensor = found.detach()
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None
