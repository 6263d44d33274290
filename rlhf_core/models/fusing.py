"""Norms, and what stands between the products of gated MLPs, fused by torch.compile.

Left out: the products themselves. Compiled together with the rest, they would round their weights anew for every
micro-batch, which costs more than it gains.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.models.forward import states_of_probe

logger = logging.getLogger("rlhf")

# Roundings between the fused operations stay where they were without the compiler; no workers that outlive a stage.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True, "compile_threads": 1}
# Of the largest state: what another order of sums may change. A wrong function changes more.
_ROUNDING = {"float32": 1e-4, "bf16-autocast": 5e-2, "bfloat16": 5e-2}


def fuse_layers(model: PreTrainedModel, precision: str) -> None:
    """Let one fused kernel each run norms and act(gate) * up, forwards and backwards.

    The compiler also makes cheap activations again in the backward pass instead of keeping them. Results are the same
    up to rounding. Where there is nothing to fuse, the compiler fails, or states change, the model stays as it is, with
    a warning.

    Args:
        model: About to be trained; on its device.
        precision: compute.precision.
    """
    base: Any = model.base_model
    modules = [module for module in (*norms(base), *gated(base)) if "forward" not in vars(module)]
    before = states_of_probe(base, precision)
    for module in modules:
        module.forward = _fused(module)
    after = states_of_probe(base, precision)
    if not modules or before is None or after is None or not _close(before, after, precision):
        for module in modules:
            del module.forward
        logger.warning("compute.torch_compile has no effect: %s cannot be compiled", type(model).__name__)


def norms(model: nn.Module) -> list[Any]:
    """Return the norms of a model's layers."""
    children = [module for layer in _layers(model) for module in layer.children()]
    return [module for module in children if type(module).__name__.endswith("Norm")]


def gated(model: nn.Module) -> list[Any]:
    """Return the MLPs of a model's layers that compute down(act(gate(x)) * up(x))."""
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    inside = [module for layer in _layers(model) for module in layer.modules()]
    return [module for module in inside if all(hasattr(module, name) for name in names)]


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _fused(module: Any) -> Callable[[Tensor], Tensor]:
    """Return a module's forward, compiled; torch takes one kernel for all modules with the same code."""
    if not hasattr(module, "gate_proj"):
        return _compiled(module.forward)
    activation = module.act_fn
    product = _compiled(lambda gate, up: activation(gate) * up)
    return lambda hidden: module.down_proj(product(module.gate_proj(hidden), module.up_proj(hidden)))


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(function, dynamic=True, options=_OPTIONS)
    return compiled


def _close(before: Tensor, after: Tensor, precision: str) -> bool:
    return bool((after - before).abs().max() <= _ROUNDING[precision] * before.abs().max())
