"""From token rewards to advantages and returns, by the estimator that params.yaml names.

Left out: the rewards themselves (shaping.py), whitening (whitening.py), and what is known of the whole iteration
(iteration.py).
"""

from typing import Literal, NamedTuple

import numpy as np

from rlhf_core.algorithms.advantages import GroupEstimator, gae, rewards_to_go
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
from rlhf_core.algorithms.statistics import sequence_sums
from rlhf_core.errors import SchemaMismatch

Estimator = Literal["gae", "reward_minus_value", "reinforce_plus_plus"] | GroupEstimator


class Estimates(NamedTuple):
    """Per token, all [N] float64 in reward units (whitened advantages: none).

    returns and bootstrap_returns are None without a critic. bootstrap_returns is [B], NaN for the rows without a slot.
    """

    rewards: PerToken
    advantages: PerToken
    returns: PerToken | None
    bootstrap_returns: PerRow | None


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
    compared: PerRow | None,
) -> Estimates:
    """Return advantages and returns, before advantages are whitened.

    Args:
        responses: Of the iteration.
        rewards, offsets, slots: From shaped_rewards; scaled where advantages.whiten_rewards is set.
        estimator: gae, reward_minus_value (A_t = R_i - V_t, with R_i the sum of the response's rewards),
            reinforce_plus_plus (A_t = rewards_to_go), or one of group_advantages: all tokens of a response the same.
        gamma, gae_lambda: See gae.
        value_gae_lambda: Lambda of the returns; None = gae_lambda. Only gae: the others learn from rewards_to_go.
        compared: [B], from group_advantages; None for the other estimators.

    Returns:
        Estimates.

    Raises:
        SchemaMismatch: If the estimator needs values and there are none.
        RowMismatch: If lengths disagree.
    """
    values = _slotted_values(responses, slots, estimator)
    if compared is not None:
        advantages = np.repeat(compared, lengths(offsets))
    elif estimator == "gae" and values is not None:
        advantages = gae(rewards, values, offsets, gamma=gamma, gae_lambda=gae_lambda)
    elif estimator == "reward_minus_value" and values is not None:
        advantages = np.repeat(sequence_sums(rewards, offsets), lengths(offsets)) - values
    else:
        advantages = rewards_to_go(rewards, offsets, gamma=gamma)
    returns, bootstrap_returns = None, None
    if values is not None:
        if estimator != "gae":
            targets = rewards_to_go(rewards, offsets, gamma=gamma)
        elif value_gae_lambda is None:
            targets = advantages + values
        else:
            targets = gae(rewards, values, offsets, gamma=gamma, gae_lambda=value_gae_lambda) + values
        returns, at_slots = without_slots(targets, responses.offsets, slots)
        bootstrap_returns = np.full(slots.size, np.nan)
        bootstrap_returns[slots] = at_slots
    advantages, rewards = (without_slots(x, responses.offsets, slots)[0] for x in (advantages, rewards))
    return Estimates(rewards, advantages, returns, bootstrap_returns)


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
