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
from rlhf_core.algorithms.reward_state import Moments, adapted_kl_coef, merged, scaled_scores
from rlhf_core.algorithms.rewards import final_scores, overlong_penalties, token_rewards
from rlhf_core.algorithms.statistics import sequence_sums, token_mean
from rlhf_core.errors import NumericError, SchemaMismatch


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
) -> tuple[PerRow, Moments]:
    """Return the score that each response is paid: scaled, clipped, less what it pays for not ending or for its length.

    Args:
        responses: All of the iteration.
        moments: Of the scores of earlier iterations. Those of this iteration's own responses with tokens are merged
            before anything is scaled; replayed ones were merged when they were new. Untouched by score_scaling none.
        max_new_tokens, overlong_buffer, overlong_penalty: See overlong_penalties.
        score_scaling: See scaled_scores.
        score_clip, missing_eos_penalty, missing_eos_mode: See final_scores.

    Returns:
        [B], float64, reward units; and the moments for the next iteration.

    Raises:
        NumericError: If scores are to be scaled, and only replayed ones were ever seen.
    """
    if score_scaling != "none":
        moments = merged(moments, responses.scores[responses.own & responses.filled])
        if moments.count == 0 and responses.filled.any():
            raise NumericError(
                f"advantages.score_scaling is {score_scaling}, but no score was merged into the moments yet: an"
                " iteration that only replays cannot be the first with score_scaling"
            )
    scores = scaled_scores(responses.scores, moments, score_scaling=score_scaling)
    final = final_scores(
        scores,
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
    ), moments


def token_kl(responses: Responses, *, kl_estimator: KlEstimator, conventions: Conventions) -> PerToken:
    """Return the KL of each token by the chosen estimator, with the bounds of the conventions.

    Args:
        responses: All of the iteration; with kl_estimator full they have full_kl.
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


def next_kl_coef(responses: Responses, kl_coef: float, *, kl_target: float, kl_horizon: int) -> float:
    """Return the controller's coefficient for the next iteration, by the KL of this iteration's own responses.

    Args:
        responses: All of the iteration. Replayed ones are another policy's and do not count; nor do empty ones.
        kl_coef: Reward units per nat, of this iteration.
        kl_target, kl_horizon: See adapted_kl_coef.

    Returns:
        Reward units per nat; unchanged when there is no response of its own.
    """
    own = responses.own & responses.filled
    if not own.any():
        return kl_coef
    k1 = kl_estimate(responses.logprobs, responses.ref_logprobs, estimator="k1")
    kl = token_mean(sequence_sums(k1, responses.offsets)[own])
    return adapted_kl_coef(kl_coef, kl=kl, responses=int(own.sum()), kl_target=kl_target, kl_horizon=kl_horizon)


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
        responses: All of the iteration. Without a critic there is no value after the last token, hence no slot.
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


def objective_metrics(responses: Responses, scores: PerRow, kl: PerToken, *, kl_coef: float) -> dict[str, float]:
    """Return what the policy that sampled this iteration earned, in means over its own responses with tokens.

    Args:
        responses: All of the iteration. Replayed ones are another policy's and do not count.
        scores: [B], reward units, from shaped_scores.
        kl: [N], nats, from token_kl.
        kl_coef: Reward units per nat, of this iteration.

    Returns:
        Metrics by name, reward units; only objective/kl_coef when nothing was sampled.
    """
    metrics = {"objective/kl_coef": kl_coef}
    if responses.own.any():
        own = responses.own & responses.filled
        non_score = -kl_coef * token_mean(sequence_sums(kl, responses.offsets)[own])
        final = token_mean(scores[own])
        metrics |= {
            "objective/non_score_reward": non_score,
            "objective/scores_final": final,
            "objective/rlhf_reward": non_score + final,
        }
    return metrics
