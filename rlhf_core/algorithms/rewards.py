"""From one score per response to one reward per token. Left out: where scores come from (rlhf_core/reward)."""

from typing import Literal

import numpy as np

from rlhf_core.algorithms.ragged import (
    Lengths,
    Offsets,
    PerRow,
    PerToken,
    RowFlags,
    check_offsets,
    check_same_size,
    lengths,
)


def final_scores(
    scores: PerRow,
    finished: RowFlags,
    *,
    score_clip: float | None,
    missing_eos_penalty: float,
    missing_eos_mode: Literal["subtract", "replace", "scale"],
) -> PerRow:
    """Return the score that each response is rewarded with.

        s     = clip(score, -score_clip, score_clip)
        final = s                               finished
                s - missing_eos_penalty         not finished, subtract
                -missing_eos_penalty            not finished, replace
                s * (1 - missing_eos_penalty)   not finished, scale

    The penalty comes after the clip, so that it is always whole.

    Args:
        scores: [B], reward units.
        finished: [B], True where the model ended the response by itself (finish_reason "stop").
        score_clip: Reward units, positive; None = off.
        missing_eos_penalty: Reward units, 0 or more; with scale a share. 0 = off, in every mode.
        missing_eos_mode: subtract keeps the order of what was cut off; replace makes all of it equally bad; scale pulls
            towards 0, which is a gain for a score below 0.

    Returns:
        [B], float64, reward units; a new array.

    Raises:
        RowMismatch: If the lengths differ.

    Source: replace: Huang et al. 2024, "The N+ implementation details of RLHF with PPO", detail on the EOS trick;
    subtract: TRL's missing_eos_penalty; scale: OpenRLHF's stop_properly_penalty_coef, which is 1 minus ours.
    """
    check_same_size(scores=scores, finished=finished)
    final = scores.astype(np.float64)
    if score_clip is not None:
        final = np.clip(final, -score_clip, score_clip)
    if missing_eos_penalty == 0:
        return final
    if missing_eos_mode == "subtract":
        return final - missing_eos_penalty * ~finished
    if missing_eos_mode == "replace":
        return np.where(finished, final, -missing_eos_penalty)
    return np.where(finished, final, final * (1 - missing_eos_penalty))


def overlong_penalties(
    lengths: Lengths, *, max_new_tokens: int, overlong_buffer: int, overlong_penalty: float
) -> PerRow:
    """Return what each response pays for nearing the longest allowed length.

        penalty_i = overlong_penalty * clip((T_i - (max_new_tokens - buffer)) / buffer, 0, 1)

    Args:
        lengths: [B], int64, tokens, T.
        max_new_tokens: Tokens, the longest response that was allowed.
        overlong_buffer: Tokens over which the penalty grows; 0 = off.
        overlong_penalty: Reward units, 0 or more, at max_new_tokens and beyond.

    Returns:
        [B], float64, reward units, 0 or more: to be subtracted from the score.

    Source: Yu et al. 2025, "DAPO: An open-source LLM reinforcement learning system at scale", eq. 13, there with a
    penalty of 1.
    """
    if overlong_buffer == 0:
        return np.zeros(lengths.size)
    beyond = (lengths - (max_new_tokens - overlong_buffer)) / overlong_buffer
    return overlong_penalty * np.clip(beyond, 0.0, 1.0)


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
