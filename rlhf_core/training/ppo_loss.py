"""The loss of one micro-batch of the PPO update, as its share of the whole minibatch's.

Losses and metrics of the parts of a minibatch add up to those of the whole, whether its rows were split into
micro-batches or over processes.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlhf_core.algorithms.aggregation import token_weights
from rlhf_core.algorithms.diagnostics import policy_diagnostics, value_diagnostics
from rlhf_core.algorithms.losses import LOG_RATIO_CAP, kl_loss, policy_loss, sequence_log_ratios, value_loss
from rlhf_core.models.batching import Batch
from rlhf_core.models.forward import TokenOutputs
from rlhf_core.training.responses import Responses


@dataclass(frozen=True)
class Settings:
    """What the update needs to know, from params.yaml (units there) and from the artifacts, nulls resolved."""

    iteration: str  # for messages
    temperature: float
    ppo_epochs: int
    minibatch_size: int
    old_logprobs: Literal["trainer", "sampler"]
    ratio: Literal["token", "sequence"]
    clip_range: float
    clip_range_high: float
    dual_clip: float | None
    value_clip_range: float | None
    value_loss_factor: float
    value_coef: float
    entropy_coef: float
    kl_loss_coef: float
    kl_loss_estimator: Literal["k1", "k2", "k3", "absolute"]
    kl_estimate_bound: float | None
    aggregation: Literal["token_mean", "sequence_mean", "constant"]
    aggregation_constant: float
    target_kl: float | None
    max_kl: float | None
    max_skipped_steps: int
    max_grad_norm: float
    max_batch_tokens: int
    logits_chunk_tokens: int
    precision: str
    pad_id: int
    seed: int


@dataclass(frozen=True)
class Whole:
    """Counts of a whole minibatch, by which each of its parts divides."""

    responses: int
    tokens: int
    states: int  # with a return: the tokens, and the slots after last tokens where the conventions have them

    @classmethod
    def of(cls, responses: Responses, rows: list[int]) -> "Whole":
        """Return the counts of these rows."""
        tokens = sum(len(responses.response_ids[row]) for row in rows)
        return cls(len(rows), tokens, tokens + len(responses.slots(rows)))


def micro_batch_loss(
    outputs: TokenOutputs, responses: Responses, batch: Batch, whole: Whole, settings: Settings
) -> tuple[Tensor, dict[str, float], float]:
    """Return one micro-batch's share of the minibatch's loss.

    Args:
        outputs: Of the policy and critic that are being updated, for the batch.
        responses: Before the update.
        batch: Which of them.
        whole: Counts of the minibatch that it is a part of.
        settings: Hyperparameters.

    Returns:
        (loss, metrics, ratio_error): a scalar with its gradient; the batch's share of each metric, to be added up; and
        the largest |ratio - 1|, of which the largest counts.
    """
    log_ratios = _log_ratios(outputs, responses, batch, settings)
    loss, found = _policy_terms(log_ratios, outputs, responses, batch, whole, settings)
    if outputs.values is not None:
        value_terms, value_found = _value_terms(outputs, responses, batch, whole, settings)
        loss, found = loss + value_terms, found | value_found
    ratio_error = torch.expm1(log_ratios.detach().clamp(max=LOG_RATIO_CAP)).abs().max()
    return loss, {name: float(share) for name, share in found.items()}, float(ratio_error)


def likely_cause(outputs: TokenOutputs, responses: Responses, rows: list[int]) -> str:
    """Say which number makes a micro-batch's loss infinite or not a number.

    Args:
        outputs: Of the policy and critic, for these rows.
        responses: That they belong to.
        rows: Of the micro-batch.
    """
    if not torch.isfinite(outputs.logprobs).all():
        return "the policy's own logprobs are not finite, so its weights are broken; lower ppo_update.learning_rate"
    if outputs.values is not None and not torch.isfinite(outputs.values).all():
        return "the critic's values are not finite, so its weights are broken; lower its learning rate"
    largest = {
        (name, row): float(np.abs(getattr(responses, name)[row]).max())  # NaN where there is one
        for name in ("advantages", "returns", "importance_weights", "logprobs", "ref_logprobs")
        for row in rows
        if getattr(responses, name) is not None
    }
    (name, row), value = max(largest.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return (
        f"{name} of {responses.sample_ids[row]}, up to {value:.3g}; look at the row with `rlhf inspect data/advantages"
        f" --sample-id {responses.sample_ids[row]} --tokens`"
    )


def _log_ratios(outputs: TokenOutputs, responses: Responses, batch: Batch, settings: Settings) -> Tensor:
    """[N], nats, with gradient: how much likelier each token, or its whole response, has become."""
    logprobs = responses.flat("logprobs", batch.rows, outputs.logprobs.device)
    if settings.ratio == "sequence":
        return sequence_log_ratios(outputs.logprobs, logprobs, batch.lengths)
    return outputs.logprobs - logprobs


def _policy_terms(
    log_ratios: Tensor, outputs: TokenOutputs, responses: Responses, batch: Batch, whole: Whole, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy, KL and entropy losses, and their metrics."""
    ref_logprobs, importance_weights, advantages = (
        responses.flat(name, batch.rows, log_ratios.device)
        for name in ("ref_logprobs", "importance_weights", "advantages")
    )
    clip: dict[str, Any] = {
        "clip_range": settings.clip_range,
        "clip_range_high": settings.clip_range_high,
        "dual_clip": settings.dual_clip,
    }
    weights = token_weights(
        batch.lengths,
        aggregation=settings.aggregation,
        tokens=whole.tokens,
        responses=whole.responses,
        constant=settings.aggregation_constant,
    ).to(log_ratios.device)
    policy_term = (weights * policy_loss(log_ratios, advantages, importance_weights, **clip)).sum()
    kls = kl_loss(
        outputs.logprobs,
        ref_logprobs,
        estimator=settings.kl_loss_estimator,
        estimate_bound=settings.kl_estimate_bound,
    )
    kl_term = (weights * kls).sum()
    entropy_term = (weights * outputs.entropy).sum()
    moved = policy_diagnostics(log_ratios, advantages, **clip)
    shares = {name: total / whole.tokens for name, total in moved.items()}
    metrics = {
        "loss/policy_avg": policy_term.detach(),
        "loss/kl_avg": kl_term.detach(),
        "policy/entropy_avg": outputs.entropy.detach().sum() / whole.tokens,
        "policy/approxkl_avg": shares["approxkl"],
        "policy/approxkl_k3_avg": shares["approxkl_k3"],
        "policy/clipfrac_avg": shares["clipfrac"],
        "policy/clipfrac_low_avg": shares["clipfrac_low"],
        "policy/clipfrac_high_avg": shares["clipfrac_high"],
        "policy/dual_clipfrac_avg": shares["dual_clipfrac"],
        "val/ratio": shares["ratio"],
        "ratio_squared": shares["ratio_squared"],
    }
    return policy_term + settings.kl_loss_coef * kl_term - settings.entropy_coef * entropy_term, metrics


def _value_terms(
    outputs: TokenOutputs, responses: Responses, batch: Batch, whole: Whole, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The value loss over all states that have a return, and its metrics."""
    assert outputs.values is not None and outputs.bootstrap_values is not None
    device = outputs.values.device
    slots = responses.slots(batch.rows)
    new_values = torch.cat([outputs.values, outputs.bootstrap_values[slots]])
    values, returns = (
        torch.cat([responses.flat(name, batch.rows, device), responses.after(bootstrap, batch.rows, slots, device)])
        for name, bootstrap in (("values", "bootstrap_value"), ("returns", "bootstrap_return"))
    )
    losses = value_loss(
        new_values,
        values,
        returns,
        value_clip_range=settings.value_clip_range,
        factor=settings.value_loss_factor,
    )
    value_term = losses.sum(dtype=torch.float64) / whole.states
    found = value_diagnostics(new_values, values, returns, value_clip_range=settings.value_clip_range)
    metrics = {
        "loss/value_avg": value_term.detach(),
        "val/clipfrac_avg": found["clipfrac"] / whole.states,
        "val/squared_error": found["squared_error"] / whole.states,
    }
    return settings.value_coef * value_term, metrics
