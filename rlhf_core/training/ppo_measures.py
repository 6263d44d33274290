"""What is measured when a PPO update has ended: means over its steps, its critic, how far it moved the policy."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from rlhf_core.algorithms.mismatch import mismatch
from rlhf_core.algorithms.statistics import explained_variance
from rlhf_core.errors import NumericError
from rlhf_core.models.batching import Batch
from rlhf_core.models.forward import for_all_rows, token_outputs, values_alone, without_pads
from rlhf_core.models.memory import TokenBudget
from rlhf_core.training.distributed import Processes
from rlhf_core.training.learner import Learner
from rlhf_core.training.ppo import Progress
from rlhf_core.training.ppo_loss import Settings
from rlhf_core.training.responses import Responses


def summary(progress: Progress) -> dict[str, float]:
    """Return the update's metrics: means over its optimiser steps (as TRL), and the first step's ratio error."""
    log = progress.log
    averaged = {name: float(np.mean([row[name] for row in log])) for name in log[0]}
    first_error = log[0]["policy/ratio_error_max"]
    for name in ("policy/ratio_error_max", "val/squared_error"):
        averaged.pop(name, None)
    for name in ("grad_norm", "critic_grad_norm"):
        if name in averaged:
            averaged[f"{name}_avg"] = averaged.pop(name)
    averaged["lr"] = log[-1]["lr"]
    return averaged | {
        "policy/max_first_ratio_error": first_error,
        "optimizer_steps": len(log),
        "update/stopped_early": int(progress.stopped),
        "update/skipped_steps": progress.skipped,
    }


def explained_variance_after(learner: Learner, responses: Responses, settings: Settings, processes: Processes) -> float:
    """Return the explained variance of the returns by the updated critic, on the responses it was trained on."""
    critic = learner.critic
    assert critic is not None and responses.returns is not None

    def compute(batch: Batch) -> list[Tensor]:
        values, _ = values_alone(learner.policy, critic, batch, precision=settings.precision)
        return list(values.split(batch.lengths))

    values = _of_all_tokens(compute, learner, responses, settings, processes)
    return explained_variance(values, np.concatenate(responses.returns))


def kl_after(learner: Learner, responses: Responses, settings: Settings, processes: Processes) -> float:
    """Return how far the update moved the policy: mean of exp(d) - 1 - d over tokens, d = new_logprob - logprob, nats.

    Raises:
        NumericError: If that is above max_kl.
    """

    def compute(batch: Batch) -> list[Tensor]:
        outputs = token_outputs(
            learner.policy,
            batch,
            temperature=settings.temperature,
            logits_chunk_tokens=settings.logits_chunk_tokens,
            precision=settings.precision,
            critic=None,
        )
        return list(outputs.logprobs.split(batch.lengths))

    new_logprobs = _of_all_tokens(compute, learner, responses, settings, processes)
    moved = mismatch(np.concatenate(responses.logprobs), new_logprobs)["k3"]
    if settings.max_kl is not None and not moved <= settings.max_kl:
        raise NumericError(
            f"iteration {settings.iteration}: the update moved the policy by {moved:.4g} nats a token"
            f" (policy/approxkl_k3_after), allowed is ppo_update.max_kl = {settings.max_kl}; no checkpoint was"
            " published. Lower ppo_update.learning_rate or ppo_epochs, let target_kl end the update in time, or raise"
            " max_kl"
        )
    return moved


def _of_all_tokens(
    compute: Callable[[Batch], Sequence[Tensor]],
    learner: Learner,
    responses: Responses,
    settings: Settings,
    processes: Processes,
) -> np.ndarray:
    """What a forward pass gives for each response token, [N] float32 in row order, in every process."""
    lengths = [len(p) + len(r) for p, r in zip(responses.prompt_ids, responses.response_ids, strict=True)]
    rows = processes.share(lengths)
    found = for_all_rows(
        compute,
        [responses.prompt_ids[row] for row in rows],
        [responses.response_ids[row] for row in rows],
        packed=without_pads(*learner.models()),
        budget=TokenBudget(settings.max_batch_tokens),
        pad_id=settings.pad_id,
        device=learner.policy.device,
        progress=lambda rows: None,
    )
    return np.concatenate(processes.collected(len(lengths), rows, [row.numpy() for row in found]))
