"""The PPO update: several epochs of clipped policy and value steps over one iteration's responses.

Every loss of a minibatch is a sum over its micro-batches divided by the minibatch's own count of response tokens, so
neither losses nor gradients depend on how the minibatch was split. Models stay in eval mode: dropout would make the
ratio differ from 1 before the first step. Left out: files (stages/ppo_update.py).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.algorithms.diagnostics import policy_diagnostics, value_diagnostics
from rlhf_core.algorithms.losses import policy_loss, value_loss
from rlhf_core.errors import NumericError, RowMismatch
from rlhf_core.models.batching import Batch, collate, token_budget_batches
from rlhf_core.models.forward import TokenOutputs, token_outputs
from rlhf_core.training.optimizer import clip_and_step

logger = logging.getLogger("rlhf")

# A first ratio further from 1 than this means that scoring and training run different code paths, not rounding:
# float32 on CPU stays below 1e-4, bfloat16 products reach a few tenths on rare tokens.
_FIRST_RATIO_LIMIT = {"float32": 1e-3, "bf16-autocast": 0.5, "bfloat16": 0.5}


@dataclass(frozen=True)
class Responses:
    """One iteration's responses, without those of no tokens."""

    sample_ids: list[str]  # [B]
    prompt_ids: list[list[int]]  # [B]
    response_ids: list[list[int]]  # [B], each at least one token
    logprobs: list[np.ndarray]  # [B] of [T] float32, nats, under the policy before the update
    values: list[np.ndarray]  # [B] of [T] float32
    advantages: list[np.ndarray]  # [B] of [T] float32
    returns: list[np.ndarray]  # [B] of [T] float32

    def flat(self, name: str, rows: list[int], device: torch.device) -> Tensor:
        """Return one of the token-aligned fields of these rows as one flat tensor [N]."""
        column: list[np.ndarray] = getattr(self, name)
        return torch.from_numpy(np.concatenate([column[row] for row in rows])).to(device)


@dataclass(frozen=True)
class Settings:
    """What the update needs to know, from params.yaml (units there) and from the rollouts (temperature)."""

    temperature: float
    ppo_epochs: int
    minibatch_size: int
    clip_range: float
    value_clip_range: float
    value_coef: float
    entropy_coef: float
    max_grad_norm: float
    max_batch_tokens: int
    logits_chunk_tokens: int
    precision: str
    pad_id: int
    seed: int


def minibatches(rows: int, *, ppo_epochs: int, minibatch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield minibatches of row indices: each epoch visits every row once, in its own seeded order.

    Args:
        rows: Number of responses.
        ppo_epochs: Passes over them.
        minibatch_size: Responses; the last of an epoch is smaller where rows do not divide.
        seed: The whole order is a function of it.
    """
    generator = np.random.default_rng(seed)
    for _ in range(ppo_epochs):
        order = generator.permutation(rows).tolist()
        for start in range(0, rows, minibatch_size):
            yield sorted(order[start : start + minibatch_size])  # a sum's rounding then depends on the set alone


def update(
    policy: PreTrainedModel,
    value_head: nn.Linear,
    responses: Responses,
    optimizer: torch.optim.AdamW,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    settings: Settings,
    progress: Callable[[dict[str, float]], None],
) -> list[dict[str, float]]:
    """Train policy and value head in place and return the metrics of every optimiser step.

        loss = mean_t policy_loss_t + value_coef * mean_t value_loss_t - entropy_coef * mean_t entropy_t

    with means over the response tokens of a minibatch.

    Args:
        policy: The policy that sampled the responses; its trunk is shared with the critic.
        value_head: Reads the policy's last hidden state.
        responses: With logprobs and values of this policy and critic before the update.
        optimizer: Over all trainable parameters of both.
        scheduler: Stepped once per minibatch.
        settings: Hyperparameters.
        progress: Told the metrics after each step.

    Returns:
        One dict per optimiser step, names as in docs/metrics.md.

    Raises:
        NumericError: If a loss or gradient is not finite; that step is not taken.
        RowMismatch: If there is no response with tokens.
    """
    if not responses.sample_ids:
        raise RowMismatch("expected responses to train on, found none with at least one token")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    log: list[dict[str, float]] = []
    order = minibatches(
        len(responses.sample_ids),
        ppo_epochs=settings.ppo_epochs,
        minibatch_size=settings.minibatch_size,
        seed=settings.seed,
    )
    for step, rows in enumerate(order):
        metrics = _accumulate(policy, value_head, responses, rows, settings, step=step)
        if step == 0:
            _check_first_ratio(metrics["policy/ratio_error_max"], settings.precision)
        metrics["lr"] = float(scheduler.get_last_lr()[0])
        metrics["grad_norm"] = clip_and_step(
            optimizer, scheduler, parameters, max_grad_norm=settings.max_grad_norm, where=_where(step, responses, rows)
        )
        log.append(metrics)
        progress(metrics)
    return log


def _accumulate(
    policy: PreTrainedModel,
    value_head: nn.Linear,
    responses: Responses,
    rows: list[int],
    settings: Settings,
    *,
    step: int,
) -> dict[str, float]:
    """Add the gradient of one minibatch, micro-batch by micro-batch, and return its metrics."""
    device = value_head.weight.device
    tokens = sum(len(responses.response_ids[row]) for row in rows)
    lengths = [len(responses.prompt_ids[row]) + len(responses.response_ids[row]) for row in rows]
    sums: dict[str, float] = defaultdict(float)
    ratio_error = 0.0
    for group in token_budget_batches(lengths, max_batch_tokens=settings.max_batch_tokens):
        part = [rows[place] for place in group]
        batch = collate(responses.prompt_ids, responses.response_ids, part, pad_id=settings.pad_id, device=device)
        loss, found, error = _micro_batch(policy, value_head, responses, batch, settings)
        if not math.isfinite(float(loss.detach())):
            raise NumericError(
                f"{_where(step, responses, part)}: the loss is {float(loss.detach())}; the step was not taken"
            )
        (loss / tokens).backward()
        for name, value in found.items():
            sums[name] += value
        ratio_error = max(ratio_error, error)
    mean_ratio = sums["ratio"] / tokens
    return {
        "loss/policy_avg": sums["policy_loss"] / tokens,
        "loss/value_avg": sums["value_loss"] / tokens,
        "policy/entropy_avg": sums["entropy"] / tokens,
        "policy/approxkl_avg": sums["approxkl"] / tokens,
        "policy/approxkl_k3_avg": sums["approxkl_k3"] / tokens,
        "policy/clipfrac_avg": sums["clipfrac"] / tokens,
        "policy/ratio_error_max": ratio_error,
        "val/ratio": mean_ratio,
        "val/ratio_var": max(sums["ratio_squared"] / tokens - mean_ratio**2, 0.0),
        "val/clipfrac_avg": sums["value_clipfrac"] / tokens,
        "val/squared_error": sums["squared_error"] / tokens,
    }


def outputs_and_values(
    policy: PreTrainedModel, value_head: nn.Linear, batch: Batch, settings: Settings
) -> tuple[TokenOutputs, Tensor]:
    """Return what token_outputs gives for a batch, and its values [N] float32, which a value head always gives."""
    outputs = token_outputs(
        policy,
        batch,
        temperature=settings.temperature,
        logits_chunk_tokens=settings.logits_chunk_tokens,
        precision=settings.precision,
        value_head=value_head,
    )
    assert outputs.values is not None
    return outputs, outputs.values


def _micro_batch(
    policy: PreTrainedModel, value_head: nn.Linear, responses: Responses, batch: Batch, settings: Settings
) -> tuple[Tensor, dict[str, float], float]:
    """The summed (not averaged) loss of one micro-batch, its sums for the metrics, and the largest |ratio - 1|."""
    device = batch.input_ids.device
    outputs, new_values = outputs_and_values(policy, value_head, batch, settings)
    logprobs, values, advantages, returns = (
        responses.flat(name, batch.rows, device) for name in ("logprobs", "values", "advantages", "returns")
    )
    policy_losses = policy_loss(outputs.logprobs, logprobs, advantages, clip_range=settings.clip_range)
    value_losses = value_loss(new_values, values, returns, value_clip_range=settings.value_clip_range)
    loss = (
        policy_losses.sum() + settings.value_coef * value_losses.sum() - settings.entropy_coef * outputs.entropy.sum()
    )
    real = torch.ones_like(logprobs, dtype=torch.bool)
    found = policy_diagnostics(outputs.logprobs, logprobs, advantages, real, clip_range=settings.clip_range)
    critic = value_diagnostics(new_values, values, returns, real, value_clip_range=settings.value_clip_range)
    found |= {
        "policy_loss": policy_losses.detach().sum(),
        "value_loss": value_losses.detach().sum(),
        "entropy": outputs.entropy.detach().sum(),
        "value_clipfrac": critic["clipfrac"],
        "squared_error": critic["squared_error"],
    }
    error = float(torch.expm1(outputs.logprobs.detach() - logprobs).abs().max())
    return loss, {name: float(value) for name, value in found.items()}, error


def _check_first_ratio(error: float, precision: str) -> None:
    limit = _FIRST_RATIO_LIMIT[precision]
    if error > limit:
        logger.warning(
            "before any step, a ratio is already off 1 by %.3g (expected below %g for %s): logprobs of data/scores were"
            " not made by this policy in this precision",
            error,
            limit,
            precision,
        )


def _where(step: int, responses: Responses, rows: list[int]) -> str:
    names = ", ".join(responses.sample_ids[row] for row in rows[:4])
    return f"optimiser step {step + 1}, rows {names}{', ...' if len(rows) > 4 else ''}"


def summary(log: list[dict[str, float]]) -> dict[str, float]:
    """Return the update's metrics: means over its optimiser steps (as TRL), and the first step's ratio error."""
    averaged = {name: float(np.mean([row[name] for row in log])) for name in log[0]}
    first_error = log[0]["policy/ratio_error_max"]
    del averaged["policy/ratio_error_max"], averaged["val/squared_error"]
    averaged["grad_norm_avg"] = averaged.pop("grad_norm")
    averaged["lr"] = log[-1]["lr"]
    return averaged | {"policy/max_first_ratio_error": first_error, "optimizer_steps": len(log)}
