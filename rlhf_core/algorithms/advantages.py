"""Advantage estimators over ragged rows. Left out: whitening, and which of them a run uses (estimates.py)."""

from typing import Literal, NamedTuple, no_type_check

import numba
import numpy as np

from rlhf_core.algorithms.ragged import Groups, Offsets, PerRow, PerToken, RowFlags, check_offsets, check_same_size

GroupEstimator = Literal["rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline"]


def gae(rewards: PerToken, values: PerToken, offsets: Offsets, *, gamma: float, gae_lambda: float) -> PerToken:
    """Return the generalised advantage estimate of each token.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * gae_lambda * A_{t+1}

    within each row; after a row's last token V and A are 0, because the episode ends there, finished or cut off.

    Args:
        rewards: [N], reward units, from token_rewards.
        values: [N], reward units, V of the state before each token.
        offsets: [B + 1], int64, rows of the flat arrays. Rows of length 0 are skipped.
        gamma: Discount per token, in [0, 1].
        gae_lambda: In [0, 1]; 0 = TD error, 1 = discounted return minus V.

    Returns:
        [N], float64, reward units; a new array. The recursion runs in float64 whatever the inputs are.

    Raises:
        RowMismatch: If the lengths differ or offsets do not fit them.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation",
    eq. 16 as a backward recursion; r_t is the reward for token t, received after it.
    """
    check_same_size(rewards=rewards, values=values)
    check_offsets(offsets, tokens=rewards.size)
    wide = [np.ascontiguousarray(array, dtype=np.float64) for array in (rewards, values)]
    out: PerToken = _gae_rows(*wide, offsets, float(gamma), float(gae_lambda))
    return out


def rewards_to_go(rewards: PerToken, offsets: Offsets, *, gamma: float) -> PerToken:
    """Return the discounted sum of each token's own and later rewards.

        G_t = sum over u >= t of gamma^(u - t) * r_u

    within each row: GAE with lambda 1 and V 0.

    Args:
        rewards: [N], reward units, from token_rewards.
        offsets: [B + 1], int64, rows of rewards.
        gamma: Discount per token, in [0, 1].

    Returns:
        [N], float64, reward units; a new array.

    Raises:
        RowMismatch: If offsets do not fit.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning";
    as the advantage of REINFORCE++: Hu 2025, "REINFORCE++: An efficient RLHF algorithm with robustness to both prompt
    and reward models".
    """
    return gae(rewards, np.zeros(rewards.size), offsets, gamma=gamma, gae_lambda=1.0)


class GroupAdvantages(NamedTuple):
    """One advantage per response, [B] float64 (0 for a response that is not counted), and how many groups there are."""

    advantages: PerRow
    groups: int
    groups_of_one: int
    constant_groups: int


def group_advantages(
    totals: PerRow, groups: Groups, counted: RowFlags, *, estimator: GroupEstimator, epsilon: float
) -> GroupAdvantages:
    """Return what each response earned beyond the other responses to its prompt.

    With R_i the sum of a response's rewards, over the n counted responses of its group:
        rloo                           R_i - mean of the n - 1 others
        grpo                           (R_i - mean) / (std + epsilon), std divided by n - 1
        dr_grpo                        R_i - mean
        reinforce_plus_plus_baseline   R_i - mean (it differs from dr_grpo by what follows: whitening over all tokens)

    A group of one has nobody to compare with, and in a constant group (all R exactly equal) nobody is better: both give
    exactly 0. Groups may have any sizes and their rows any order.

    Args:
        totals: [B], reward units, R.
        groups: [B], int64; equal numbers make a group.
        counted: [B], True for the responses that count; those without tokens do not.
        estimator: See above.
        epsilon: Reward units; grpo only.

    Returns:
        GroupAdvantages, in reward units (grpo: none). constant_groups are those of two or more.

    Raises:
        RowMismatch: If the lengths differ.

    Source: Ahmadian et al. 2024, "Back to basics: Revisiting REINFORCE-style optimization for learning from human
    feedback in LLMs", eq. 7; Shao et al. 2024, "DeepSeekMath", section 4.1.2 (the divisor n - 1 is that of TRL, verl
    and OpenRLHF); Liu et al. 2025, "Understanding R1-Zero-like training: A critical perspective" (Dr. GRPO); Hu 2025,
    "REINFORCE++" (baseline form).
    """
    check_same_size(totals=totals, groups=groups, counted=counted)
    advantages = np.zeros(totals.size)
    rows = np.flatnonzero(counted)
    if rows.size == 0:
        return GroupAdvantages(advantages, 0, 0, 0)
    rows = rows[np.argsort(groups[rows], kind="stable")]
    ordered = totals[rows].astype(np.float64)
    starts = np.flatnonzero(np.diff(groups[rows], prepend=groups[rows[0]] - 1))
    sizes = np.diff(starts, append=rows.size)
    centred = ordered - np.repeat(np.add.reduceat(ordered, starts) / sizes, sizes)
    constant = np.minimum.reduceat(ordered, starts) == np.maximum.reduceat(ordered, starts)
    # The rounded mean of n equal numbers need not be that number.
    centred[np.repeat(constant, sizes)] = 0.0
    others = np.maximum(sizes - 1, 1)
    if estimator == "rloo":
        centred *= np.repeat(sizes / others, sizes)  # R_i - (n mean - R_i) / (n - 1) = (R_i - mean) n / (n - 1)
    elif estimator == "grpo":
        centred /= np.repeat(np.sqrt(np.add.reduceat(centred * centred, starts) / others) + epsilon, sizes)
    advantages[rows] = centred
    return GroupAdvantages(advantages, sizes.size, int((sizes == 1).sum()), int((constant & (sizes > 1)).sum()))


# Compiled once on a machine (cache), which takes longer than many a run; nogil: shards are computed in threads.
@numba.njit(cache=True, nogil=True)
@no_type_check
def _gae_rows(rewards, values, offsets, gamma, gae_lambda):
    advantages = np.empty(rewards.size, np.float64)
    for row in range(offsets.size - 1):
        next_value = 0.0
        next_advantage = 0.0
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * gae_lambda * next_advantage
            next_value = values[t]
            advantages[t] = next_advantage
    return advantages
