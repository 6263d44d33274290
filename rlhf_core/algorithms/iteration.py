"""All that the advantages stage computes for an iteration whose tokens are never all in memory.

What a response's numbers take from the other responses (moments of scores, of rewards and of advantages; its group) is
found in passes of their own, only where a parameter asks for it; then everything else is a function of the response.
No number depends on how the responses are cut into parts.

Order: scores (scaled, clipped, penalised) -> rewards -> whiten_rewards (scale only, slots included) -> estimator ->
returns -> whiten_advantages (tokens only). Returns and all metrics are those before advantages are whitened.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from rlhf_core.algorithms.advantages import GroupAdvantages, GroupEstimator, group_advantages
from rlhf_core.algorithms.conventions import Conventions, KlEstimator, Variance
from rlhf_core.algorithms.estimates import Estimates, Estimator, estimate
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.moments import EMPTY, RowMoments, Summary, row_moments
from rlhf_core.algorithms.off_policy import correction_metrics, importance_weights
from rlhf_core.algorithms.ragged import Offsets, PerRow, PerSlottedToken, PerToken, RowFlags
from rlhf_core.algorithms.responses import Responses
from rlhf_core.algorithms.reward_state import Moments, RewardState, adapted_kl_coef
from rlhf_core.algorithms.shaping import score_moments, shaped_rewards, shaped_scores, token_kl
from rlhf_core.algorithms.statistics import sequence_sums
from rlhf_core.algorithms.whitening import whiten

# Applies a function to all responses of the iteration, part by part, and gives what it returns in their order.
Each = Callable[[Callable[[Responses], Any]], Iterable[Any]]


@dataclass(frozen=True)
class Recipe:
    """The group advantages of params.yaml, and what goes with it. docs/parameters.md defines each."""

    estimator: Estimator
    gamma: float
    gae_lambda: float
    value_gae_lambda: float | None
    kl_coef: float
    kl_estimator: KlEstimator
    kl_controller: Literal["fixed", "adaptive"]
    kl_target: float
    kl_horizon: int
    score_scaling: Literal["none", "running_std", "running_mean_std"]
    score_clip: float | None
    missing_eos_penalty: float
    missing_eos_mode: Literal["subtract", "replace", "scale"]
    overlong_buffer: int
    overlong_penalty: float
    whiten_rewards: bool
    whiten_advantages: bool
    whitening_variance: Variance | None
    correction: Literal["none", "truncate", "mask", "reject_sequence"]
    correction_min: float
    correction_max: float
    conventions: Conventions
    max_new_tokens: int

    def whitened(self, x: PerToken, whole: Summary | None, *, shift_mean: bool) -> PerToken:
        """Return x whitened by the moments of the whole iteration; without any, x itself."""
        if whole is None:
            return x
        variance = self.whitening_variance or self.conventions.whitening_variance
        return whiten(x, whole, shift_mean=shift_mean, variance=variance, epsilon=self.conventions.whitening_epsilon)


@dataclass(frozen=True)
class Known:
    """What a response's numbers take from the rest of the iteration, and from those before. None: not asked for.

    Attributes:
        kl_coef: Reward units per nat.
        scores: Moments that scores are scaled with.
        rewards: Of all token rewards and slots.
        groups: Of all responses.
        advantages: Of all tokens.
    """

    kl_coef: float
    scores: Moments
    rewards: Summary | None
    groups: GroupAdvantages | None
    advantages: Summary | None


class Finished(NamedTuple):
    """What is written for some responses: estimates, and the importance weights [N]; and what metrics sum up."""

    estimates: Estimates
    weights: PerToken
    moments: dict[str, RowMoments]
    counts: dict[str, int]


def known_of(each: Each, recipe: Recipe, state: RewardState) -> Known:
    """Return what is to be known of the whole iteration before the numbers of any response are.

    Args:
        each: Over all responses; called once for each thing that a parameter asks for.
        recipe: The parameters.
        state: What the previous iteration left.

    Raises:
        NumericError: See score_moments.
    """
    known = Known(recipe.kl_coef, state.scores, rewards=None, groups=None, advantages=None)
    if recipe.kl_controller == "adaptive" and state.kl_coef is not None:
        known = replace(known, kl_coef=state.kl_coef)
    if recipe.score_scaling != "none":
        seen = list(each(lambda part: (part.scores[part.own & part.filled], bool(part.filled.any()))))
        scores, any_filled = np.concatenate([own for own, _ in seen]), any(filled for _, filled in seen)
        moments = score_moments(state.scores, scores, any_filled=any_filled, score_scaling=recipe.score_scaling)
        known = replace(known, scores=moments)
    if recipe.whiten_rewards:
        found = each(lambda part: _reward_moments(part, recipe, known))
        known = replace(known, rewards=_joined(found))
    if recipe.estimator in get_args(GroupEstimator):
        known = replace(known, groups=_compared(each, recipe, known))
    if recipe.whiten_advantages:
        found = each(lambda part: row_moments(_estimates(part, recipe, known).advantages, part.offsets))
        known = replace(known, advantages=_joined(found))
    return known


class Rewarded(NamedTuple):
    """Scores [B] as they are paid, KL [N], and rewards [N + slots] with their offsets and the rows that have a slot."""

    scores: PerRow
    kl: PerToken
    rewards: PerSlottedToken
    offsets: Offsets
    slots: RowFlags


def rewarded(responses: Responses, recipe: Recipe, known: Known) -> Rewarded:
    """Return the rewards that the estimator sees."""
    scores = shaped_scores(
        responses,
        known.scores,
        max_new_tokens=recipe.max_new_tokens,
        score_scaling=recipe.score_scaling,
        score_clip=recipe.score_clip,
        missing_eos_penalty=recipe.missing_eos_penalty,
        missing_eos_mode=recipe.missing_eos_mode,
        overlong_buffer=recipe.overlong_buffer,
        overlong_penalty=recipe.overlong_penalty,
    )
    kl = token_kl(responses, kl_estimator=recipe.kl_estimator, conventions=recipe.conventions)
    rewards, offsets, slots = shaped_rewards(
        responses,
        scores,
        kl,
        kl_coef=known.kl_coef,
        max_new_tokens=recipe.max_new_tokens,
        conventions=recipe.conventions,
    )
    return Rewarded(scores, kl, recipe.whitened(rewards, known.rewards, shift_mean=False), offsets, slots)


def finished(responses: Responses, recipe: Recipe, known: Known) -> Finished:
    """Return everything that is written for some responses, and what the metrics need of them.

    Args:
        responses: Any consecutive ones.
        recipe: The parameters.
        known: Of all responses of the iteration.
    """
    paid = rewarded(responses, recipe, known)
    found = _estimates(responses, recipe, known, paid)
    weights, truncated, rejected = importance_weights(
        responses.sampler_logprobs,
        responses.logprobs,
        responses.offsets,
        correction=recipe.correction,
        correction_min=recipe.correction_min,
        correction_max=recipe.correction_max,
    )
    own, offsets = responses.own & responses.filled, responses.offsets
    moments = {"weights": row_moments(weights, offsets), "scores": _rows(paid.scores[own])}
    moments["kl"] = _rows(sequence_sums(paid.kl, offsets)[own])
    if recipe.kl_controller == "adaptive":
        k1 = kl_estimate(responses.logprobs, responses.ref_logprobs, estimator="k1")
        moments["k1"] = _rows(sequence_sums(k1, offsets)[own])
    if known.advantages is None:
        moments["advantages"] = row_moments(found.advantages, offsets)
    if found.returns is not None and responses.values is not None:
        moments["returns"], moments["values"] = (row_moments(x, offsets) for x in (found.returns, responses.values))
        moments["residuals"] = row_moments(np.subtract(found.returns, responses.values), offsets)
    counts = {
        "own": int(responses.own.sum()),
        "empty": int((~responses.filled).sum()),
        "zeroed": weights.size - int(np.count_nonzero(weights)),
        "truncated": truncated,
        "rejected": rejected,
    }
    white = recipe.whitened(found.advantages, known.advantages, shift_mean=True)
    return Finished(found._replace(advantages=white), weights, moments, counts)


class Totals:
    """What metrics sum up, over all parts of an iteration."""

    def __init__(self) -> None:
        self.moments: dict[str, Summary] = {}
        self.counts: dict[str, int] = {}

    def add(self, moments: dict[str, RowMoments], counts: dict[str, int]) -> None:
        """Add the next responses, in the order of the iteration."""
        for name, rows in moments.items():
            self.moments[name] = self.moments.get(name, EMPTY).joined(rows)
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


def next_state(totals: Totals, recipe: Recipe, known: Known, before: RewardState) -> RewardState:
    """Return what the next iteration starts from: the coefficient follows the KL of this iteration's own responses."""
    if recipe.kl_controller == "fixed":
        return RewardState(kl_coef=before.kl_coef, scores=known.scores)
    k1 = totals.moments.get("k1", EMPTY)
    if k1.count == 0:
        return RewardState(kl_coef=known.kl_coef, scores=known.scores)
    following = adapted_kl_coef(
        known.kl_coef, kl=k1.mean, responses=k1.count, kl_target=recipe.kl_target, kl_horizon=recipe.kl_horizon
    )
    return RewardState(kl_coef=following, scores=known.scores)


def metrics_of(totals: Totals, known: Known) -> dict[str, int | float]:
    """Return metrics by name: objective/ over the own responses, the others over all tokens, replayed ones included."""
    of = lambda name: totals.moments.get(name, EMPTY)
    metrics: dict[str, Any] = {"objective/kl_coef": known.kl_coef}
    if totals.counts.get("own"):
        non_score, final = -known.kl_coef * of("kl").mean, of("scores").mean
        metrics |= {
            "objective/non_score_reward": non_score,
            "objective/scores_final": final,
            "objective/rlhf_reward": non_score + final,
        }
    if known.groups is not None:
        names = ("groups", "groups_of_one", "constant_groups")
        metrics |= {f"advantages/{name}": getattr(known.groups, name) for name in names}
    advantages = known.advantages or of("advantages")
    metrics |= {
        "advantages/mean": advantages.mean,
        "advantages/std": advantages.std,
        "advantages/tokens": advantages.count,
        "advantages/empty_responses": totals.counts.get("empty", 0),
    }
    if "returns" in totals.moments:
        returns = of("returns")
        metrics |= {"returns/mean": returns.mean, "returns/std": returns.std, "values/mean": of("values").mean}
        metrics["val/explained_variance"] = 1.0 - of("residuals").m2 / returns.m2 if returns.m2 else 0.0
    cut = {name: totals.counts.get(name, 0) for name in ("zeroed", "truncated", "rejected")}
    return metrics | correction_metrics(of("weights"), **cut)


def _estimates(responses: Responses, recipe: Recipe, known: Known, paid: Rewarded | None = None) -> Estimates:
    """Estimates before advantages are whitened."""
    _, _, rewards, offsets, slots = paid or rewarded(responses, recipe, known)
    rows = slice(responses.first_row, responses.first_row + responses.offsets.size - 1)
    return estimate(
        responses,
        rewards,
        offsets,
        slots,
        estimator=recipe.estimator,
        gamma=recipe.gamma,
        gae_lambda=recipe.gae_lambda,
        value_gae_lambda=recipe.value_gae_lambda,
        compared=None if known.groups is None else known.groups.advantages[rows],
    )


def _reward_moments(responses: Responses, recipe: Recipe, known: Known) -> RowMoments:
    paid = rewarded(responses, recipe, known)
    return row_moments(paid.rewards, paid.offsets)


def _compared(each: Each, recipe: Recipe, known: Known) -> GroupAdvantages:
    """What each response earned beyond the others of its group, wherever their rows are."""

    def totals(part: Responses) -> tuple[PerRow, Any, RowFlags]:
        paid = rewarded(part, recipe, known)
        return sequence_sums(paid.rewards, paid.offsets), part.groups, part.filled

    sums, groups, filled = (np.concatenate(column) for column in zip(*each(totals), strict=True))
    epsilon = recipe.conventions.grpo_epsilon
    return group_advantages(sums, groups, filled, estimator=recipe.estimator, epsilon=epsilon)  # type: ignore[arg-type]


def _joined(parts: Iterable[RowMoments]) -> Summary:
    return reduce(Summary.joined, parts, EMPTY)


def _rows(x: PerRow) -> RowMoments:
    """Moments of numbers that there is one of for each row."""
    return RowMoments(np.ones(x.size, np.int64), x, np.zeros(x.size))
