"""From one score per response to one reward per token. Left out: where scores come from (rlhf_core/reward)."""

import numpy as np

from rlhf_core.algorithms.ragged import Offsets, PerRow, PerToken, RowFlags, check_offsets, check_same_size, lengths


def final_scores(scores: PerRow, finished: RowFlags, *, missing_eos_penalty: float, score_clip: float | None) -> PerRow:
    """Return the score that each response is rewarded with.

        final = clip(score, -score_clip, score_clip) - missing_eos_penalty * (not finished)

    The penalty comes after the clip, so that a response which did not end is always worse off by all of it.

    Args:
        scores: [B], reward units.
        finished: [B], True where the model ended the response by itself (finish_reason "stop").
        missing_eos_penalty: Reward units, 0 or more; 0 = off.
        score_clip: Reward units, positive; None = off.

    Returns:
        [B], float64, reward units; a new array.

    Raises:
        RowMismatch: If the lengths differ.

    Source: Huang et al. 2024, "The N+ implementation details of RLHF with PPO", detail on the EOS trick (there the
    score is replaced by a constant; a penalty, as in TRL's missing_eos_penalty, keeps the order of what was cut off).
    """
    check_same_size(scores=scores, finished=finished)
    final = scores.astype(np.float64)
    if score_clip is not None:
        final = np.clip(final, -score_clip, score_clip)
    return final - missing_eos_penalty * ~finished


def token_rewards(kl: PerToken, scores: PerRow, offsets: Offsets, *, kl_coef: float) -> PerToken:
    """Return the reward of each token: the KL penalty, and the whole score at the response's last token.

        r_t = -kl_coef * kl_t + (score if t is the last token of its response else 0)

    The last token is the last one that was sampled: the EOS if there is one. A response without tokens has no place
    for a score: it receives none, and no other response receives it.

    Args:
        kl: [N], nats, from kl_estimate.
        scores: [B], reward units, from final_scores.
        offsets: [B + 1], int64, rows of the flat array.
        kl_coef: Reward units per nat.

    Returns:
        [N], float64, reward units; a new array.

    Raises:
        RowMismatch: If offsets do not fit kl and scores.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", eq. 2, spread over tokens.
    """
    check_offsets(offsets, tokens=kl.size, rows=scores.size)
    rewards = kl.astype(np.float64) * -kl_coef
    filled = lengths(offsets) > 0
    rewards[offsets[1:][filled] - 1] += scores[filled]
    return rewards
