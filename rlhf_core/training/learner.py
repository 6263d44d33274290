"""Policy and critic with their optimiser, as the PPO update trains them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.models.checkpoint import OptimizerState
from rlhf_core.models.critic import Critic
from rlhf_core.training.optimizer import Kind, NamedParameters, adamw, captured, restore, schedule, trainable

# What new_learner takes from ppo_update's parameters.
LEARNER = {
    "optimizer",
    "learning_rate",
    "value_head_learning_rate",
    "critic_learning_rate",
    "adam_betas",
    "adam_eps",
    "weight_decay",
    "lr_schedule",
    "warmup_steps",
    "schedule_steps",
}


@dataclass(frozen=True)
class Learner:
    """What a step changes."""

    policy: PreTrainedModel
    critic: Critic | None
    parts: Mapping[str, NamedParameters]  # policy, value_head and critic (a separate one's backbone), as far as trained
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def models(self) -> list[PreTrainedModel]:
        """Return the models that run over rows: the policy, and the backbone of a separate critic."""
        backbone = None if self.critic is None else self.critic.backbone
        return [self.policy] if backbone is None else [self.policy, backbone]

    def clip_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return which parameters' gradients are clipped together, by the name of the norm's metric.

        A value head on the policy's trunk goes with the policy; a separate critic goes by itself.
        """
        separate = {"critic", "value_head"} if "critic" in self.parts else set()
        groups: dict[str, list[nn.Parameter]] = {}
        for part, named in self.parts.items():
            name = "critic_grad_norm" if part in separate else "grad_norm"
            groups.setdefault(name, []).extend(parameter for _, parameter in named)
        return groups

    def trained(self) -> NamedParameters:
        """Return the parameters of all parts."""
        return [pair for named in self.parts.values() for pair in named]

    def state(self, before: OptimizerState, *, steps: int, episode: int) -> OptimizerState:
        """Return the optimiser's state for the next iteration.

        Args:
            before: The state that this update started from; what was not trained keeps its part of it.
            steps: Optimiser steps taken.
            episode: See OptimizerState.
        """
        return captured(self.optimizer, self.parts, before, steps=steps, episode=episode)


def new_learner(
    policy: PreTrainedModel,
    critic: Critic | None,
    state: OptimizerState,
    *,
    critic_only: bool,
    optimizer: Kind,
    learning_rate: float,
    value_head_learning_rate: float,
    critic_learning_rate: float,
    adam_betas: Sequence[float],
    adam_eps: float,
    weight_decay: float,
    lr_schedule: str,
    warmup_steps: int,
    schedule_steps: int,
) -> Learner:
    """Return policy and critic with an optimiser that goes on where the state left it.

    Args:
        policy: Frozen here when critic_only.
        critic: None = no critic.
        state: From the previous iteration.
        critic_only: Train the critic alone (warm-up); a shared critic's trunk is the policy's, so only its head then.
        optimizer: adamw, or adamw_8bit (eight_bit.py).
        learning_rate: Of the policy.
        value_head_learning_rate: Of the critic's head.
        critic_learning_rate: Of a separate critic's backbone.
        adam_betas, adam_eps, weight_decay: See torch.optim.AdamW.
        lr_schedule, warmup_steps, schedule_steps: See schedule; over the optimiser steps of all iterations.

    Raises:
        ModelError: If the state is for other parameters.
    """
    whole = {"policy": trainable(policy, "policy")}
    rates = {"policy": learning_rate, "value_head": value_head_learning_rate, "critic": critic_learning_rate}
    if critic is not None:
        whole["value_head"] = trainable(critic.head, "value_head")
        if critic.backbone is not None:
            whole["critic"] = trainable(critic.backbone, "critic")
    parts = {name: named for name, named in whole.items() if not (critic_only and name == "policy")}
    if critic_only:
        policy.requires_grad_(False)
    adam = adamw(
        [(named, rates[name]) for name, named in parts.items()],
        betas=adam_betas,
        eps=adam_eps,
        weight_decay=weight_decay,
        kind=optimizer,
    )
    restore(adam, whole, state, trained=parts.keys())
    scheduler = schedule(
        adam,
        name=lr_schedule,
        warmup_steps=warmup_steps,
        total_steps=schedule_steps,
        first_step=max(state.steps.values(), default=0),
    )
    return Learner(policy, critic, parts, adam, scheduler)
