"""AdamW over named parameters, its schedule and its steps: shared by train_rm and ppo_update."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rlhf_core.errors import ModelError, NumericError
from rlhf_core.models.checkpoint import OptimizerState

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def adamw(
    groups: Sequence[tuple[NamedParameters, float]], *, betas: Sequence[float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW over groups of (named parameters, learning rate)."""
    return torch.optim.AdamW(
        [{"params": [p for _, p in named], "lr": rate, "initial_lr": rate} for named, rate in groups],
        betas=(betas[0], betas[1]),
        eps=eps,
        weight_decay=weight_decay,
        fused=True,
    )


def schedule(
    optimizer: torch.optim.Optimizer, *, name: str, warmup_steps: int, total_steps: int, first_step: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning-rate schedule, continued at first_step.

    Args:
        optimizer: With an initial_lr in each group.
        name: constant | linear | cosine; warm-up is linear in all three.
        warmup_steps: Optimiser steps.
        total_steps: Optimiser steps at which linear and cosine reach 0.
        first_step: Steps already taken in earlier iterations.
    """
    kind = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps)
    # The schedules are pure functions of the step, so a later start needs no stored state.
    scheduler.last_epoch = first_step
    for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(first_step)
    return scheduler


def restore(optimizer: torch.optim.AdamW, named: NamedParameters, state: OptimizerState) -> None:
    """Put the stored moments back, by parameter name.

    Raises:
        ModelError: If the stored moments are for other parameters.
    """
    if state.step == 0:
        return
    names = {name for name, _ in named}
    if names != state.first_moments.keys() or names != state.second_moments.keys():
        different = sorted(names ^ state.first_moments.keys())[:3]
        raise ModelError(
            f"the optimiser state is for other parameters than the policy and critic: {', '.join(different)}"
        )
    for name, parameter in named:
        if state.first_moments[name].shape != parameter.shape:
            raise ModelError(
                f"the optimiser state of {name} has shape {list(state.first_moments[name].shape)},"
                f" expected {list(parameter.shape)}"
            )
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state.step), device=parameter.device),
            "exp_avg": state.first_moments[name].to(parameter.device, parameter.dtype),
            "exp_avg_sq": state.second_moments[name].to(parameter.device, parameter.dtype),
        }


def captured(optimizer: torch.optim.AdamW, named: NamedParameters, *, step: int, episode: int) -> OptimizerState:
    """Return the optimiser's state for the next iteration, by parameter name."""
    return OptimizerState(
        step=step,
        episode=episode,
        first_moments={name: optimizer.state[parameter]["exp_avg"] for name, parameter in named},
        second_moments={name: optimizer.state[parameter]["exp_avg_sq"] for name, parameter in named},
    )


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    parameters: Iterable[nn.Parameter],
    *,
    max_grad_norm: float,
    where: str,
) -> float:
    """Clip the gradient to a global norm, take one step, clear the gradient, and return the norm before clipping.

    Args:
        optimizer: Steps once.
        scheduler: Steps once, after the optimiser.
        parameters: All that are trained.
        max_grad_norm: Global 2-norm.
        where: For the error: which step of which stage, and which rows.

    Raises:
        NumericError: If the gradient is not finite. The step is not taken.
    """
    norm: Tensor = nn.utils.clip_grad_norm_(list(parameters), max_grad_norm)
    value = float(norm)
    if not math.isfinite(value):
        raise NumericError(
            f"{where}: the gradient's norm is {value}; the step was not taken. Likely causes: a"
            f" learning rate that is too"
            " high, or extreme scores or advantages (look at the rows with `rlhf inspect`)"
        )
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return value


def trainable(model: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, each once, under names with a prefix."""
    return [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def scalars(values: dict[str, Any]) -> dict[str, float]:
    """Return zero-dimensional tensors and numbers as Python floats."""
    return {name: float(value) for name, value in values.items()}
