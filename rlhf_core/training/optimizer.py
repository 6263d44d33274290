"""AdamW over named parameters, its schedule and its steps: shared by train_rm and ppo_update."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rlhf_core.errors import ModelError, NonFiniteStep
from rlhf_core.models.checkpoint import OptimizerState
from rlhf_core.training.eight_bit import adamw_8bit, as_floats, held, parts_of, put_together
from rlhf_core.training.lora import adapters_among

logger = logging.getLogger("rlhf")

Kind = Literal["adamw", "adamw_8bit"]
NamedParameters = Sequence[tuple[str, nn.Parameter]]


def adamw(
    groups: Sequence[tuple[NamedParameters, float]],
    *,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    kind: Kind,
) -> torch.optim.Optimizer:
    """Return AdamW over groups of (named parameters, learning rate); of kind adamw_8bit, with moments in 8 bits."""
    parameters = [{"params": [p for _, p in named], "lr": rate, "initial_lr": rate} for named, rate in groups]
    options: dict[str, Any] = {"betas": (betas[0], betas[1]), "eps": eps, "weight_decay": weight_decay}
    if kind == "adamw_8bit":
        optimizer: torch.optim.Optimizer = adamw_8bit(parameters, **options)
        return optimizer
    return torch.optim.AdamW(parameters, fused=True, **options)


def schedule(
    optimizer: torch.optim.Optimizer, *, name: str, warmup_steps: int, total_steps: int, first_step: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning-rate schedule, continued at first_step.

        step s of 0, 1, ...    factor of the learning rate
        s < warmup             (s + 1) / (warmup + 1): no step is taken with a rate of 0
        constant               1
        linear                 (total - s) / (total - warmup)
        cosine                 (1 + cos(pi (s - warmup) / (total - warmup))) / 2
        s >= total             0 for linear and cosine, for ever

    Args:
        optimizer: With an initial_lr in each group.
        name: constant | linear | cosine.
        warmup_steps: Optimiser steps.
        total_steps: Optimiser steps at which linear and cosine reach 0.
        first_step: Steps already taken in earlier iterations.
    """
    kind = "constant_with_warmup" if name == "constant" else name
    # One step more of each, looked up one step later: the library's own warm-up starts at 0. And its cosine rises again
    # after its end.
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup_steps + 1, num_training_steps=total_steps + 1)
    scheduler.lr_lambdas = [
        lambda step, factor=factor: factor((step if name == "constant" else min(step, total_steps)) + 1)
        for factor in scheduler.lr_lambdas
    ]
    _start_at(first_step, optimizer, scheduler)
    return scheduler


def _start_at(step: int, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Set the schedule to a step. Schedules are pure functions of it, so a later start needs no stored state."""
    scheduler.last_epoch = step
    for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        rate = base * factor(step)
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate


def restore(
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, NamedParameters],
    state: OptimizerState,
    *,
    trained: Collection[str],
) -> None:
    """Put the stored moments back, by parameter name.

    Args:
        optimizer: Over the trained parts.
        parts: All parts that there are; the state is checked against all of them.
        state: Stored moments of the parts that have been trained so far.
        trained: Names of the parts that this optimiser trains.

    Raises:
        ModelError: If the stored moments are for other parameters.
    """
    stored = {name: parts.get(name, []) for name, step in state.steps.items() if step}
    names = {name for named in stored.values() for name, _ in named}
    if names != state.first_moments.keys() or names != state.second_moments.keys():
        different = sorted((names ^ state.first_moments.keys()) | (names ^ state.second_moments.keys()))[:3]
        raise ModelError(
            f"the optimiser state is for other parameters than the policy and critic: {', '.join(different)}"
        )
    for part, named in stored.items():
        for name, parameter in named:
            if state.first_moments[name].shape != parameter.shape:
                raise ModelError(
                    f"the optimiser state of {name} has shape {list(state.first_moments[name].shape)},"
                    f" expected {list(parameter.shape)}"
                )
            if part in trained:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(state.steps[part]), device=parameter.device),
                    "exp_avg": held(optimizer, parameter, "exp_avg", state.first_moments[name]),
                    "exp_avg_sq": held(optimizer, parameter, "exp_avg_sq", state.second_moments[name]),
                }


def captured(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, NamedParameters],
    before: OptimizerState,
    *,
    steps: int,
    episode: int,
) -> OptimizerState:
    """Return the optimiser's state for the next iteration, by parameter name.

    Args:
        optimizer: After its steps.
        trained: The parts that it trained.
        before: The state that it started from; the other parts are taken over from it.
        steps: Optimiser steps since then.
        episode: See OptimizerState.
    """
    named = [pair for part in trained.values() for pair in part]
    first = {name: as_floats(optimizer.state[parameter]["exp_avg"]) for name, parameter in named}
    second = {name: as_floats(optimizer.state[parameter]["exp_avg_sq"]) for name, parameter in named}
    return OptimizerState(
        steps=before.steps | {part: before.steps.get(part, 0) + steps for part in trained},
        episode=episode,
        first_moments=before.first_moments | first,
        second_moments=before.second_moments | second,
        adapters=before.adapters | adapters_among(named),
    )


def training_state(optimizer: torch.optim.Optimizer, named: NamedParameters) -> dict[str, Tensor]:
    """Return all that a step changes besides the schedule: weights, moments and step counts of the trained parameters.

    Args:
        optimizer: Over these parameters.
        named: All that are trained.

    Returns:
        The tensors themselves, no copies, named weight/<name>, exp_avg/<name>, exp_avg_sq/<name> and step/<name>;
        moments in 8 bits as exp_avg.codes/<name> and so on.
    """
    tensors = {f"weight/{name}": parameter.detach() for name, parameter in named}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors |= {f"{part}/{name}": tensor for part, tensor in parts_of(key, value).items()}
    return tensors


def put_training_state(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    named: NamedParameters,
    tensors: Mapping[str, Tensor],
    *,
    schedule_step: int,
) -> None:
    """Put back what training_state returned, bit by bit.

    Args:
        optimizer: As new_learner or adamw made it.
        scheduler: Set to a step.
        named: All that are trained.
        tensors: Of the same parameters.
        schedule_step: scheduler.last_epoch of that time.
    """
    of: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        of.setdefault(name, {})[kind] = tensor
    with torch.no_grad():
        for name, parameter in named:
            parts = of[name]
            parameter.copy_(parts["weight"])
            if "step" in parts:
                optimizer.state[parameter] = {
                    key: put_together(optimizer, parameter, key, parts) for key in ("step", "exp_avg", "exp_avg_sq")
                }
    _start_at(schedule_step, optimizer, scheduler)


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    groups: Mapping[str, Sequence[nn.Parameter]],
    *,
    max_grad_norm: float,
    where: str,
) -> dict[str, float]:
    """Clip each group's gradient to a global norm, take one step, clear the gradient, and return the norms before it.

    Args:
        optimizer: Steps once.
        scheduler: Steps once, after the optimiser.
        groups: All parameters that are trained, by the name of the group's norm. One that took no part in the loss
            counts as one with gradient 0, as it does among several processes.
        max_grad_norm: 2-norm over a group.
        where: For the error: which step of which stage, and which rows.

    Raises:
        NonFiniteStep: If a gradient is not finite. The step is not taken, and the gradient is cleared.
    """
    for parameter in (parameter for parameters in groups.values() for parameter in parameters):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norms = {name: float(nn.utils.clip_grad_norm_(parameters, max_grad_norm)) for name, parameters in groups.items()}
    for name, norm in norms.items():
        if not math.isfinite(norm):
            optimizer.zero_grad(set_to_none=True)
            raise NonFiniteStep(
                f"{where}: the gradient's norm ({name}) is {norm}; the step was not taken. Likely causes: a learning"
                " rate that is too high, or extreme scores or advantages (look at the rows with `rlhf inspect`)"
            )
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norms


def count_skipped(error: NonFiniteStep, skipped: int, *, most: int, key: str) -> int:
    """Count a step that was refused, and say so.

    Args:
        error: Why it was.
        skipped: Steps refused before.
        most: How many may be.
        key: The parameter that says so.

    Returns:
        skipped + 1.

    Raises:
        NonFiniteStep: If that is more than may be.
    """
    if skipped >= most:
        raise NonFiniteStep(f"{error}. Refused before: {skipped} steps; {key} = {most}")
    logger.warning("%s. Going on without it: %d of %d (%s)", error, skipped + 1, most, key)
    return skipped + 1


def trainable(model: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, each once, under names with a prefix."""
    return [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
