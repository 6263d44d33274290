"""One iteration's responses from plain lists, and everything that the advantages stage computes for them."""

from typing import Any, NamedTuple

import numpy as np

from rlhf_core.algorithms.conventions import CONVENTIONS
from rlhf_core.algorithms.estimates import Estimates
from rlhf_core.algorithms.iteration import Recipe, Totals, finished, known_of, metrics_of, next_state
from rlhf_core.algorithms.responses import Responses
from rlhf_core.algorithms.reward_state import Moments, RewardState
from rlhf_core.config import AdvantageParams

Rows = list[list[float]]
FRESH = RewardState(kl_coef=None, scores=Moments(0, 0.0, 0.0))

# Every option off, so that a test names what it switches on.
PLAIN: dict[str, Any] = {
    "estimator": "gae",
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "value_gae_lambda": None,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "kl_controller": "fixed",
    "kl_target": 6.0,
    "kl_horizon": 10000,
    "score_scaling": "none",
    "score_clip": None,
    "missing_eos_penalty": 0.0,
    "missing_eos_mode": "subtract",
    "overlong_buffer": 0,
    "overlong_penalty": 1.0,
    "whiten_rewards": False,
    "whiten_advantages": False,
    "whitening_variance": None,
    "correction": "none",
    "correction_min": 0.5,
    "correction_max": 2.0,
}


class Result(NamedTuple):
    """What one iteration's advantages stage finds."""

    estimates: Estimates
    weights: np.ndarray
    state: RewardState
    metrics: dict[str, Any]


def flat(rows: Rows) -> np.ndarray:
    """All rows behind each other, float64."""
    return np.array([value for row in rows for value in row], np.float64)


def responses(
    logprobs: Rows,
    ref_logprobs: Rows,
    values: Rows | None,
    scores: list[float],
    *,
    bootstrap: list[float] | None = None,
    sampler: Rows | None = None,
    full_kl: Rows | None = None,
    finished: list[bool] | None = None,
    own: list[bool] | None = None,
    groups: list[int] | None = None,
) -> Responses:
    """Rows of tokens as one iteration's responses; what is left out is unremarkable."""
    count = len(scores)
    return Responses(
        first_row=0,
        offsets=np.cumsum([0, *map(len, logprobs)], dtype=np.int64),
        own=np.array([True] * count if own is None else own, bool),
        groups=np.array(range(count) if groups is None else groups, np.int64),
        finished=np.array([True] * count if finished is None else finished, bool),
        scores=np.array(scores, np.float64),
        sampler_logprobs=flat(logprobs if sampler is None else sampler),
        logprobs=flat(logprobs),
        ref_logprobs=flat(ref_logprobs),
        full_kl=None if full_kl is None else flat(full_kl),
        values=None if values is None else flat(values),
        bootstrap_values=None if values is None else np.array([0.0] * count if bootstrap is None else bootstrap),
    )


def rewarded(totals: list[float], groups: list[int], lengths: list[int] | None = None) -> Responses:
    """Responses without KL and critic, of one token each unless told: R_i is the score."""
    tokens = [[-1.0] * n for n in lengths or [1] * len(totals)]
    return responses(tokens, tokens, None, totals, groups=groups)


def estimated(
    batch: Responses,
    *,
    conventions: str = "ours",
    max_new_tokens: int = 100,
    state: RewardState = FRESH,
    **changes: Any,
) -> Result:
    """All that the stage computes, with PLAIN parameters but for the changes."""
    params = AdvantageParams(**{**PLAIN, **changes})
    return computed(batch, params, conventions=conventions, max_new_tokens=max_new_tokens, state=state)


def computed(
    batch: Responses, params: AdvantageParams, *, conventions: str, max_new_tokens: int, state: RewardState = FRESH
) -> Result:
    """All that the stage computes, for responses that are in memory as one part."""
    recipe = Recipe(**params.model_dump(), conventions=CONVENTIONS[conventions], max_new_tokens=max_new_tokens)
    known = known_of(lambda work: [work(batch)], recipe, state)
    found, totals = finished(batch, recipe, known), Totals()
    totals.add(found.moments, found.counts)
    return Result(found.estimates, found.weights, next_state(totals, recipe, known, state), metrics_of(totals, known))
