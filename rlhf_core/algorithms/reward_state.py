"""What reward shaping hands from iteration to iteration: the adaptive KL coefficient and the moments of all scores.

Left out: the file it is kept in (stages/advantages.py).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhf_core.algorithms.ragged import PerRow

# The controller's error is clipped to +- this, so that one iteration changes the coefficient by a bounded share.
ERROR_CLIP = 0.2

# A deviation below this share of the mean is rounding: scores are float32, whose digits end at 6e-8.
ROUNDING = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations from the mean, of all scores so far."""

    count: int
    mean: float
    m2: float


@dataclass(frozen=True)
class RewardState:
    """The state after an iteration. kl_coef None: no adaptive controller has run yet."""

    kl_coef: float | None
    scores: Moments


def merged(moments: Moments, scores: PerRow) -> Moments:
    """Return the moments of what was seen and of new scores together.

        n = a + b,  delta = mean_b - mean_a
        mean = mean_a + delta * b / n
        m2   = m2_a + m2_b + delta^2 * a * b / n

    Args:
        moments: Of a scores, a >= 0.
        scores: [b], reward units, finite.

    Returns:
        Moments of a + b scores, in float64.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    if scores.size == 0:
        return moments
    count, mean = scores.size, float(np.mean(scores, dtype=np.float64))
    m2 = float(np.square(scores.astype(np.float64) - mean).sum())
    total, delta = moments.count + count, mean - moments.mean
    return Moments(
        count=total,
        mean=moments.mean + delta * count / total,
        m2=moments.m2 + m2 + delta * delta * moments.count * count / total,
    )


def scaled_scores(
    scores: PerRow, moments: Moments, *, score_scaling: Literal["none", "running_std", "running_mean_std"]
) -> PerRow:
    """Return the scores divided by the deviation of all scores so far, so that reward models of any scale compare.

        running_std         s / std                std = sqrt(m2 / count), of the population
        running_mean_std    (s - mean) / std

    Args:
        scores: [B], reward units.
        moments: Of all scores, these included.
        score_scaling: none = as they are.

    Returns:
        [B], float64. Where all scores so far are equal, std counts as 1; as they are where there were none.

    Source: Engstrom et al. 2020, "Implementation matters in deep policy gradients" (reward scaling, there of discounted
    sums); Zheng et al. 2023, "Secrets of RLHF in large language models part I: PPO" (scores).
    """
    wide = scores.astype(np.float64)
    if score_scaling == "none" or moments.count == 0:
        return wide
    deviation = float(np.sqrt(moments.m2 / moments.count))
    if deviation <= ROUNDING * abs(moments.mean):
        deviation = 1.0
    return (wide - moments.mean if score_scaling == "running_mean_std" else wide) / deviation


def adapted_kl_coef(kl_coef: float, *, kl: float, responses: int, kl_target: float, kl_horizon: int) -> float:
    """Return the KL coefficient of the next iteration: higher when the policy left the reference too far, and lower.

        e    = clip(kl / kl_target - 1, -0.2, 0.2)
        next = kl_coef * (1 + e * responses / kl_horizon)

    Args:
        kl_coef: Reward units per nat, of this iteration.
        kl: Nats per response: the mean over responses of the sum of k1.
        responses: How many it was measured on.
        kl_target: Nats per response, positive.
        kl_horizon: Responses, positive.

    Returns:
        Reward units per nat, 0 or more: more responses than 5 horizons at once could turn it negative, and stop at 0.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2; the horizon is that
    of openai/lm-human-preferences, train_policy.py, AdaptiveKLController.
    """
    error = min(max(kl / kl_target - 1, -ERROR_CLIP), ERROR_CLIP)
    return max(kl_coef * (1 + error * responses / kl_horizon), 0.0)
