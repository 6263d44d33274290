"""Importance weights between the policy that sampled and the policy before the update. No gradient goes through them.

Left out: the ratio between new and old policy in the loss (losses.py), and how to measure the mismatch (mismatch.py).
"""

from typing import Literal, NamedTuple

import numpy as np

from rlhf_core.algorithms.kl import LOG_RATIO_CAP
from rlhf_core.algorithms.moments import Summary
from rlhf_core.algorithms.ragged import Offsets, PerToken, check_offsets, check_same_size, lengths
from rlhf_core.algorithms.statistics import sequence_sums


class ImportanceWeights(NamedTuple):
    """Weights [N], float64, 0 or more, and how many tokens and responses were cut."""

    weights: PerToken
    truncated: int  # tokens whose weight is correction_max in place of a larger one
    rejected: int  # responses set to 0 as a whole


def importance_weights(
    sampler_logprobs: PerToken,
    logprobs: PerToken,
    offsets: Offsets,
    *,
    correction: Literal["none", "truncate", "mask", "reject_sequence"],
    correction_min: float,
    correction_max: float,
) -> ImportanceWeights:
    """Return the weight of each token's policy loss, and how much was cut.

    With w_t = exp(logprobs_t - sampler_logprobs_t), the log-ratio bounded to +-20, and
    g = exp(mean over the response of log w_t):
        none              1
        truncate          min(w_t, correction_max)
        mask              w_t if correction_min <= w_t <= correction_max, else 0
        reject_sequence   min(w_t, correction_max) if correction_min <= g <= correction_max, else 0 for the response

    With replayed responses this is decoupled PPO: the loss clips around `logprobs` (the proximal policy), and these
    weights correct for the policy that sampled (the behaviour policy).

    Args:
        sampler_logprobs: [N], nats, as the sampler reported them.
        logprobs: [N], nats, the same tokens under the policy before the update.
        offsets: [B + 1], int64, rows of both.
        correction: See above.
        correction_min: Weight, in (0, 1).
        correction_max: Weight, above 1.

    Returns:
        ImportanceWeights.

    Raises:
        RowMismatch: If the lengths differ or offsets do not fit them.

    Source: truncate: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS),
    after Ionides 2008; mask: Ling team 2025, "Every step evolves" (IcePop); reject_sequence: the geometric mean of
    verl's rollout correction, verl/trainer/ppo/rollout_corr_helper.py; decoupled PPO: Hilton et al. 2021, "Batch size
    invariance for policy optimization".
    """
    check_same_size(sampler_logprobs=sampler_logprobs, logprobs=logprobs)
    check_offsets(offsets, tokens=logprobs.size)
    if correction == "none":
        return ImportanceWeights(np.ones(logprobs.size), truncated=0, rejected=0)
    log_ratio = np.clip(np.subtract(logprobs, sampler_logprobs, dtype=np.float64), -LOG_RATIO_CAP, LOG_RATIO_CAP)
    weights = np.exp(log_ratio)
    if correction == "mask":
        weights[(weights < correction_min) | (weights > correction_max)] = 0.0
        return ImportanceWeights(weights, truncated=0, rejected=0)
    cut = weights > correction_max
    weights = np.minimum(weights, correction_max)
    rejected = np.zeros(offsets.size - 1, bool)
    if correction == "reject_sequence":
        tokens = lengths(offsets)
        geometric = np.exp(sequence_sums(log_ratio, offsets) / np.maximum(tokens, 1))
        rejected = (geometric < correction_min) | (geometric > correction_max)
        dropped = np.repeat(rejected, tokens)
        weights[dropped], cut = 0.0, cut & ~dropped
    return ImportanceWeights(weights, truncated=int(np.count_nonzero(cut)), rejected=int(rejected.sum()))


def correction_metrics(weights: Summary, *, zeroed: int, truncated: int, rejected: int) -> dict[str, int | float]:
    """Return how much was cut, over all responses of an iteration.

        correction/weight_mean          mean weight over tokens
        correction/zeroed_fraction      share of tokens with weight 0
        correction/truncated_fraction   share of tokens whose weight is correction_max in place of a larger w
        correction/rejected_responses   responses set to 0 as a whole
        correction/ess                  (sum w)^2 / (N * sum w^2) of the weights, in [0, 1]; 1 for no tokens, 0 for no
                                        weight

    Args:
        weights: Of all tokens.
        zeroed: Tokens with weight 0.
        truncated, rejected: See ImportanceWeights.
    """
    count = max(weights.count, 1)
    squares = weights.mean * weights.mean + weights.m2 / count
    return {
        "correction/weight_mean": weights.mean,
        "correction/zeroed_fraction": zeroed / count,
        "correction/truncated_fraction": truncated / count,
        "correction/rejected_responses": rejected,
        "correction/ess": 1.0 if weights.count == 0 else weights.mean * weights.mean / squares if squares else 0.0,
    }
