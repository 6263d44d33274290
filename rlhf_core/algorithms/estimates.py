"""From token rewards to advantages, returns and their metrics, by the estimator that params.yaml names.

Left out: the rewards themselves (shaping.py) and the off-policy weights (off_policy.py).
"""

from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from rlhf_core.algorithms.advantages import GroupEstimator, gae, group_advantages, rewards_to_go
from rlhf_core.algorithms.conventions import Conventions, Variance
from rlhf_core.algorithms.ragged import (
    Offsets,
    PerRow,
    PerSlottedToken,
    PerToken,
    RowFlags,
    lengths,
    with_slots,
    without_slots,
)
from rlhf_core.algorithms.responses import Responses
from rlhf_core.algorithms.statistics import explained_variance, mean_and_std, sequence_sums, token_mean
from rlhf_core.algorithms.whitening import whiten
from rlhf_core.errors import SchemaMismatch

Estimator = Literal["gae", "reward_minus_value", "reinforce_plus_plus"] | GroupEstimator


class Estimates(NamedTuple):
    """Per token, all [N] float64 in reward units (whitened advantages: none); metrics by name.

    returns and bootstrap_returns are None without a critic. bootstrap_returns is [B], NaN for the rows without a slot.
    """

    rewards: PerToken
    advantages: PerToken
    returns: PerToken | None
    bootstrap_returns: PerRow | None
    metrics: dict[str, int | float]


def estimate(
    responses: Responses,
    rewards: PerSlottedToken,
    offsets: Offsets,
    slots: RowFlags,
    *,
    estimator: Estimator,
    gamma: float,
    gae_lambda: float,
    value_gae_lambda: float | None,
    whiten_rewards: bool,
    whiten_advantages: bool,
    whitening_variance: Variance | None,
    conventions: Conventions,
) -> Estimates:
    """Return advantages and returns of all responses of an iteration.

    Order: whiten_rewards (scale only, slots included) -> estimator -> returns -> whiten_advantages (tokens only).
    Returns and all metrics are those before advantages are whitened.

    Args:
        responses: All of the iteration: whitening over a part of them gives other numbers.
        rewards, offsets, slots: From shaped_rewards.
        estimator: gae, reward_minus_value (A_t = R_i - V_t, with R_i the sum of the response's rewards),
            reinforce_plus_plus (A_t = rewards_to_go), or one of group_advantages: all tokens of a response the same.
        gamma, gae_lambda: See gae.
        value_gae_lambda: Lambda of the returns; None = gae_lambda. Only gae: the others learn from rewards_to_go.
        whiten_rewards: Scale the rewards that the estimator sees to unit variance, with their mean kept.
        whiten_advantages: Give the advantages mean 0 and unit variance.
        whitening_variance: None = that of the conventions.
        conventions: See conventions.py.

    Returns:
        Estimates.

    Raises:
        SchemaMismatch: If the estimator needs values and there are none.
        RowMismatch: If lengths disagree.
    """
    variance = whitening_variance or conventions.whitening_variance
    scaled = partial(whiten, variance=variance, epsilon=conventions.whitening_epsilon)
    if whiten_rewards:
        rewards = scaled(rewards, shift_mean=False)
    values = _slotted_values(responses, slots, estimator)
    counts: dict[str, int | float] = {}
    if estimator == "gae" and values is not None:
        advantages = gae(rewards, values, offsets, gamma=gamma, gae_lambda=gae_lambda)
    elif estimator == "reward_minus_value" and values is not None:
        advantages = np.repeat(sequence_sums(rewards, offsets), lengths(offsets)) - values
    elif estimator == "reinforce_plus_plus":
        advantages = rewards_to_go(rewards, offsets, gamma=gamma)
    else:
        advantages, counts = _compared(responses, rewards, offsets, estimator, conventions.grpo_epsilon)
    returns, bootstrap_returns = None, None
    if values is not None:
        targets = advantages + values
        if estimator != "gae":
            targets = rewards_to_go(rewards, offsets, gamma=gamma)
        elif value_gae_lambda is not None:
            targets = gae(rewards, values, offsets, gamma=gamma, gae_lambda=value_gae_lambda) + values
        returns, at_slots = without_slots(targets, responses.offsets, slots)
        bootstrap_returns = np.full(slots.size, np.nan)
        bootstrap_returns[slots] = at_slots
    advantages, rewards = (without_slots(x, responses.offsets, slots)[0] for x in (advantages, rewards))
    metrics = counts | _metrics(responses, advantages, returns)
    if whiten_advantages:
        advantages = scaled(advantages, shift_mean=True)
    return Estimates(rewards, advantages, returns, bootstrap_returns, metrics)


def _slotted_values(responses: Responses, slots: RowFlags, estimator: Estimator) -> PerSlottedToken | None:
    """V of each token and slot; None without a critic."""
    if responses.values is None or responses.bootstrap_values is None:
        if estimator in ("gae", "reward_minus_value"):
            raise SchemaMismatch(
                f"advantages.estimator is {estimator}, but the scores have no column values: set critic.kind to shared"
                " or separate and run the score stage again"
            )
        return None
    return with_slots(responses.values, responses.bootstrap_values, responses.offsets, slots)


def _compared(
    responses: Responses, rewards: PerSlottedToken, offsets: Offsets, estimator: Estimator, epsilon: float
) -> tuple[PerSlottedToken, dict[str, int | float]]:
    """One advantage per response, spread over its tokens, and counts of groups by metric name."""
    found = group_advantages(
        sequence_sums(rewards, offsets),
        responses.groups,
        responses.filled,
        estimator=estimator,  # type: ignore[arg-type]  # the others were taken before
        epsilon=epsilon,
    )
    return np.repeat(found.advantages, lengths(offsets)), {
        "advantages/groups": found.groups,
        "advantages/groups_of_one": found.groups_of_one,
        "advantages/constant_groups": found.constant_groups,
    }


def _metrics(responses: Responses, advantages: PerToken, returns: PerToken | None) -> dict[str, int | float]:
    """Means over the tokens of all responses, replayed ones included, before advantages are whitened."""
    mean, std = mean_and_std(advantages)
    metrics: dict[str, int | float] = {
        "advantages/mean": mean,
        "advantages/std": std,
        "advantages/tokens": advantages.size,
        "advantages/empty_responses": int((~responses.filled).sum()),
    }
    if returns is not None and responses.values is not None:
        metrics["returns/mean"], metrics["returns/std"] = mean_and_std(returns)
        metrics["values/mean"] = token_mean(responses.values)
        metrics["val/explained_variance"] = explained_variance(responses.values, returns)
    return metrics
