"""From scores and logprobs to the rewards that an estimator sees. Left out: whitening them (estimates.py)."""

from typing import Literal

import numpy as np

from rlhf_core.algorithms.conventions import Conventions, KlEstimator
from rlhf_core.algorithms.kl import clipped, kl_estimate
from rlhf_core.algorithms.ragged import (
    Offsets,
    PerRow,
    PerSlottedToken,
    PerToken,
    RowFlags,
    lengths,
    slotted_offsets,
    with_slots,
)
from rlhf_core.algorithms.responses import Responses
from rlhf_core.algorithms.reward_state import Moments, merged, scaled_scores
from rlhf_core.algorithms.rewards import final_scores, overlong_penalties, token_rewards
from rlhf_core.errors import NumericError, SchemaMismatch


def score_moments(
    before: Moments,
    scores: PerRow,
    *,
    any_filled: bool,
    score_scaling: Literal["none", "running_std", "running_mean_std"],
) -> Moments:
    """Return the moments that scores are scaled with, and that go to the next iteration.

    Args:
        before: Of the scores of earlier iterations.
        scores: [B], reward units, of this iteration's own responses with tokens; replayed ones were merged when they
            were new.
        any_filled: Whether any response of the iteration, own or replayed, has tokens.
        score_scaling: none leaves the moments untouched.

    Raises:
        NumericError: If scores are to be scaled, and only replayed ones were ever seen.
    """
    if score_scaling == "none":
        return before
    moments = merged(before, scores)
    if moments.count == 0 and any_filled:
        raise NumericError(
            f"advantages.score_scaling is {score_scaling}, but no score was merged into the moments yet: an iteration"
            " that only replays cannot be the first with score_scaling"
        )
    return moments


def shaped_scores(
    responses: Responses,
    moments: Moments,
    *,
    max_new_tokens: int,
    score_scaling: Literal["none", "running_std", "running_mean_std"],
    score_clip: float | None,
    missing_eos_penalty: float,
    missing_eos_mode: Literal["subtract", "replace", "scale"],
    overlong_buffer: int,
    overlong_penalty: float,
) -> PerRow:
    """Return the score that each response is paid: scaled, clipped, less what it pays for not ending or for its length.

    Args:
        responses: Of the iteration.
        moments: From score_moments.
        max_new_tokens, overlong_buffer, overlong_penalty: See overlong_penalties.
        score_scaling: See scaled_scores.
        score_clip, missing_eos_penalty, missing_eos_mode: See final_scores.

    Returns:
        [B], float64, reward units.
    """
    final = final_scores(
        scaled_scores(responses.scores, moments, score_scaling=score_scaling),
        responses.finished,
        score_clip=score_clip,
        missing_eos_penalty=missing_eos_penalty,
        missing_eos_mode=missing_eos_mode,
    )
    return final - overlong_penalties(
        lengths(responses.offsets),
        max_new_tokens=max_new_tokens,
        overlong_buffer=overlong_buffer,
        overlong_penalty=overlong_penalty,
    )


def token_kl(responses: Responses, *, kl_estimator: KlEstimator, conventions: Conventions) -> PerToken:
    """Return the KL of each token by the chosen estimator, with the bounds of the conventions.

    Args:
        responses: Of the iteration; with kl_estimator full they have full_kl.
        kl_estimator: See kl_estimate; full takes the column that the score stage computed over the vocabulary.
        conventions: See conventions.py.

    Returns:
        [N], float64, nats.

    Raises:
        SchemaMismatch: If kl_estimator is full and there is no full_kl.
    """
    if kl_estimator == "full":
        if responses.full_kl is None:
            raise SchemaMismatch(
                "advantages.kl_estimator is full, but the scores have no column full_kl: set score.full_kl to true and"
                " run the score stage again"
            )
        kl: PerToken = responses.full_kl.astype(np.float64)
    else:
        kl = kl_estimate(
            responses.logprobs,
            responses.ref_logprobs,
            estimator=kl_estimator,
            log_ratio_bound=conventions.log_ratio_bound,
        )
    return clipped(kl, bound=conventions.kl_bound(kl_estimator))


def shaped_rewards(
    responses: Responses,
    scores: PerRow,
    kl: PerToken,
    *,
    kl_coef: float,
    max_new_tokens: int,
    conventions: Conventions,
) -> tuple[PerSlottedToken, Offsets, RowFlags]:
    """Return the reward of each token, and of the slot after a response's last token where the conventions have one.

    Args:
        responses: Of the iteration. Without a critic there is no value after the last token, hence no slot.
        scores: [B], reward units, from shaped_scores.
        kl: [N], nats, from token_kl.
        kl_coef: Reward units per nat.
        max_new_tokens: Tokens; a response that fills them has no slot, and its score lands on its last token.
        conventions: See conventions.py.

    Returns:
        Rewards [N + slots], float64, reward units; their offsets [B + 1]; and [B], True for the rows that have a slot.
    """
    tokens = lengths(responses.offsets)
    slots = (tokens > 0) & (tokens < max_new_tokens)
    if not conventions.score_slot or responses.values is None:
        slots[:] = False
    bounds = slotted_offsets(responses.offsets, slots)
    extended = with_slots(kl, np.zeros(slots.size), responses.offsets, slots)
    return token_rewards(extended, scores, bounds, kl_coef=kl_coef), bounds, slots
