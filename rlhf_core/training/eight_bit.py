"""AdamW with moments in 8 bits, block by block with a scale (Dettmers et al. 2021): torchao's, and its states.

Moments go into checkpoints as float32, whichever optimiser made them. Left out: the arithmetic, which is torchao's.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_HELD = ("codes", "scale")  # of a moment in 8 bits; everything else follows from its kind


def adamw_8bit(groups: Sequence[dict[str, Any]], *, betas: tuple[float, float], eps: float, weight_decay: float) -> Any:
    """Return torchao's AdamW with moments in 8 bits; those of fewer than 4096 numbers stay float32.

    Its step is compiled by torch.compile, which on a CPU needs a C++ compiler.

    Args:
        groups: Of parameters, as torch.optim.AdamW takes them.
        betas, eps, weight_decay: As of torch.optim.AdamW.

    Raises:
        ConfigError: If torchao cannot be imported.
    """
    try:
        library: Any = importlib.import_module("torchao.optim")  # not at the top: it is optional, and slow to import
    except ImportError as error:  # the validate stage looks for it, but that may be long ago
        raise ConfigError(f"ppo_update.optimizer is adamw_8bit, which needs torchao: {error}") from None
    return library.AdamW8bit(list(groups), betas=betas, eps=eps, weight_decay=weight_decay)


def held(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, moment: Tensor) -> Tensor:
    """Return a float32 moment as an optimiser holds it: a copy in 8 bits where that is its way, else itself.

    Args:
        optimizer: Of the parameter.
        parameter: Whose moment it is.
        name: exp_avg or exp_avg_sq.
        moment: Of the parameter's shape.
    """
    if not hasattr(optimizer, "_new_buffer"):  # which is how torchao makes its states; it has no public way
        return moment.to(parameter.device, parameter.dtype)
    buffer: Tensor = optimizer._new_buffer(parameter, _SIGNED[name])
    return buffer.copy_(moment.to(parameter.device))


def as_floats(moment: Tensor) -> Tensor:
    """Return the numbers that a moment stands for; itself where it is not in 8 bits."""
    return moment.dequantize() if _is_8bit(moment) else moment


def parts_of(name: str, state: Tensor) -> dict[str, Tensor]:
    """Return what an optimiser's state consists of, bit by bit, under names that begin with its own."""
    return {f"{name}.{part}": getattr(state, part) for part in _HELD} if _is_8bit(state) else {name: state}


def put_together(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, parts: Mapping[str, Tensor]
) -> Tensor:
    """Return the state that parts_of took apart."""
    if name in parts:
        return parts[name].to(parameter.device, copy=True)
    state = held(optimizer, parameter, name, torch.zeros_like(parameter))
    for part in _HELD:
        getattr(state, part).copy_(parts[f"{name}.{part}"])
    return state


def _is_8bit(state: Tensor) -> bool:
    return all(hasattr(state, part) for part in _HELD)
