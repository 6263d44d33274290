"""Four short responses scored by a tiny policy and critic, and one call to update them: shared by tests."""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.models.batching import collate
from rlhf_core.models.checkpoint import OptimizerState
from rlhf_core.models.critic import Critic
from rlhf_core.models.forward import token_outputs
from rlhf_core.training.distributed import ALONE, Processes
from rlhf_core.training.learner import Learner, new_learner
from rlhf_core.training.ppo import update
from rlhf_core.training.ppo_loss import Settings
from rlhf_core.training.responses import Responses
from tests.tiny import tiny_model

CPU = torch.device("cpu")
PROMPTS = [[1, 70], [1, 71, 72, 73], [1, 74], [1, 75, 76]]
RESPONSES = [[80, 81, 2], [82], [83, 84, 85, 86, 4], [87, 88]]
NO_STATE = OptimizerState(steps={}, episode=0, first_moments={}, second_moments={})


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "temperature": 0.7, "ppo_epochs": 1, "minibatch_size": 4, "old_logprobs": "trainer", "ratio": "token",
        "clip_range": 0.2, "clip_range_high": 0.2, "dual_clip": None, "value_clip_range": 0.3, "value_loss_factor": 0.5,
        "value_coef": 0.1, "entropy_coef": 0.01, "kl_loss_coef": 0.0, "kl_loss_estimator": "k3",
        "kl_estimate_bound": None,
        "aggregation": "token_mean", "aggregation_constant": 8.0, "target_kl": None, "max_kl": None,
        "max_grad_norm": 1.0, "max_skipped_steps": 0, "iteration": "1",
        "max_batch_tokens": 64, "logits_chunk_tokens": 8, "precision": "float32", "pad_id": 0, "seed": 1,
    }  # fmt: skip
    return Settings(**{**values, **changes})


def shared_critic(seed: int = 0) -> Critic:
    """A head on the tiny model's 64 hidden states, with random weights."""
    torch.manual_seed(seed)
    return Critic(nn.Linear(64, 1))


def separate_critic() -> Critic:
    """A critic with a trunk of its own, another than the policy's."""
    return Critic(shared_critic().head, tiny_model(seed=1).eval().model)


def scored(model: PreTrainedModel, critic: Critic | None, *, seed: int = 0) -> Responses:
    """The responses with logprobs and values of this very model, it as its own reference, and made-up advantages."""
    batch = collate(PROMPTS, RESPONSES, range(4), pad_id=0, device=CPU)
    with torch.no_grad():
        found = token_outputs(model, batch, temperature=0.7, logits_chunk_tokens=8, precision="float32", critic=critic)
    logprobs = found.logprobs.numpy()
    advantages = np.random.default_rng(seed).normal(size=11).astype(np.float32)
    advantages -= advantages.mean()
    ones = np.ones(11, np.float32)
    columns = [_rows(column) for column in (logprobs, logprobs.copy(), ones, advantages)]
    if critic is None:
        return Responses(list("abcd"), PROMPTS, RESPONSES, *columns)
    assert found.values is not None and found.bootstrap_values is not None
    values = found.values.numpy()
    after = found.bootstrap_values.tolist()
    columns += [_rows(values), _rows(values + advantages)]
    return Responses(list("abcd"), PROMPTS, RESPONSES, *columns, after, [None] * 4)


def _rows(flat: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum([len(response) for response in RESPONSES])[:-1])


def learner_of(
    model: PreTrainedModel,
    critic: Critic | None,
    state: OptimizerState = NO_STATE,
    *,
    learning_rate: float = 1e-3,
    critic_only: bool = False,
    **changes: Any,
) -> Learner:
    rates = {"learning_rate": learning_rate, "value_head_learning_rate": learning_rate}
    values: dict[str, Any] = {
        **rates, "critic_learning_rate": learning_rate, "optimizer": "adamw", "adam_betas": (0.9, 0.999),
        "adam_eps": 1e-8,
        "weight_decay": 0.0, "lr_schedule": "constant", "warmup_steps": 0, "schedule_steps": 1,
    }  # fmt: skip
    return new_learner(model, critic, state, critic_only=critic_only, **{**values, **changes})


def run(
    model: PreTrainedModel,
    critic: Critic | None,
    responses: Responses,
    chosen: Settings,
    state: OptimizerState = NO_STATE,
    *,
    processes: Processes = ALONE,
    **changes: Any,
) -> tuple[list[dict[str, float]], OptimizerState]:
    """One update; its log, and the optimiser's state after it."""
    learner = learner_of(model, critic, state, **changes)
    log = update(learner, responses, chosen, processes, lambda metrics: None, None).log
    return log, learner.state(state, steps=len(log), episode=4)


def weights(*modules: nn.Module) -> torch.Tensor:
    """All parameters as one copy."""
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def gradient(state: OptimizerState) -> torch.Tensor:
    """What AdamW saw in its first step: its first moment is then 0.1 times the gradient."""
    return torch.cat([moment.flatten() for moment in state.first_moments.values()]) * 10
