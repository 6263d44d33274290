"""From scores to advantages in one go: a golden row, the order of the steps, empty responses.

Mutations that must fail here: returns after whitening; rewards whitened after GAE or with the mean removed; metrics of
whitened advantages; empty responses counted in means.
"""

from typing import Any

import numpy as np
import pytest

from rlhf_core.algorithms.estimates import Estimates, estimate

# kl_coef 0.05, gamma 1, lambda 0.95. d = [-0.2, 0.1, 0.5 | 0.2].
# rewards = [0.01, -0.005, -0.025 + 1.5 | -0.01 - 0.5].
# Row 0 backwards: 1.475 - 0.2 = 1.275; -0.005 + 0.2 - 0.5 + 0.95*1.275 = 0.90625; 0.01 + 0.5 - 0.3 + 0.95*0.90625
# = 1.0709375. Row 1: -0.51 - 0.1 = -0.61. Mean 0.66054688, variance 0.55515812.
LOGPROBS, REF = [[-1.2, -0.4, -2.0], [-0.7]], [[-1.0, -0.5, -2.5], [-0.9]]
VALUES, SCORES = [[0.3, 0.5, 0.2], [0.1]], [1.5, -0.5]
REWARDS = [0.01, -0.005, 1.475, -0.51]
ADVANTAGES = [1.0709375, 0.90625, 1.275, -0.61]
RETURNS = [1.3709375, 1.40625, 1.475, -0.51]
WHITE = [0.550794, 0.329763, 0.824670, -1.705228]
PARAMS: dict[str, Any] = {
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "missing_eos_penalty": 0.0,
    "score_clip": None,
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "whiten_rewards": False,
    "whiten_advantages": False,
}


def run(rows: list[int] | None = None, **changes: Any) -> Estimates:
    """Estimate for the golden rows; None in `rows` stands for a response without tokens and a score of 7."""
    rows = [0, 1] if rows is None else rows

    def flat(of: list[list[float]]) -> np.ndarray:
        return np.array([value for i in rows if i >= 0 for value in of[i]], np.float64)

    lengths = [len(LOGPROBS[i]) if i >= 0 else 0 for i in rows]
    scores = np.array([SCORES[i] if i >= 0 else 7.0 for i in rows])
    return estimate(
        flat(LOGPROBS),
        flat(REF),
        flat(VALUES),
        scores,
        np.ones(len(rows), bool),
        np.cumsum([0, *lengths]),
        **{**PARAMS, **changes},
    )


def test_golden_rows() -> None:
    found = run()
    np.testing.assert_allclose(found.rewards, REWARDS, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.advantages, ADVANTAGES, rtol=1e-9, atol=0)
    np.testing.assert_allclose(found.returns, RETURNS, rtol=1e-9, atol=0)


def test_metrics_of_the_golden_rows() -> None:
    # Summed d: 0.4 and 0.2, so the KL reward is -0.05 * 0.3; scores 1.5 and -0.5 have mean 0.5.
    metrics = run().metrics
    residual = np.array(ADVANTAGES)
    assert metrics == pytest.approx(
        {
            "objective/non_score_reward": -0.015,
            "objective/scores_final": 0.5,
            "objective/rlhf_reward": 0.485,
            "advantages/mean": 0.66054688,
            "advantages/std": 0.55515812**0.5,
            "advantages/tokens": 4,
            "advantages/empty_responses": 0,
            "returns/mean": 3.7421875 / 4,
            "returns/std": float(np.std(RETURNS)),
            "values/mean": 0.275,
            "val/explained_variance": float(1 - np.var(residual) / np.var(RETURNS)),
        },
        rel=1e-7,
    )


def test_whitening_changes_advantages_and_nothing_else() -> None:
    plain, white = run(), run(whiten_advantages=True)
    np.testing.assert_allclose(white.advantages, WHITE, atol=1e-6)
    np.testing.assert_array_equal(white.returns, plain.returns)
    assert white.metrics == plain.metrics


def test_whitened_rewards_are_scaled_around_their_mean_before_gae() -> None:
    # mean 0.2425; lambda 0 and V(next) make A the TD error of the scaled rewards.
    mean = 0.97 / 4
    deviation = (sum((r - mean) ** 2 for r in REWARDS) / 4 + 1e-8) ** 0.5
    scaled = [(r - mean) / deviation + mean for r in REWARDS]
    found = run(whiten_rewards=True, gae_lambda=0.0)
    np.testing.assert_allclose(found.rewards, scaled, rtol=1e-9)
    expected = [scaled[0] + 0.5 - 0.3, scaled[1] + 0.2 - 0.5, scaled[2] - 0.2, scaled[3] - 0.1]
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-9)
    assert found.metrics["objective/rlhf_reward"] == pytest.approx(0.485, rel=1e-9)


@pytest.mark.parametrize("rows", [[-1, 0, 1], [0, -1, 1], [0, 1, -1]])
def test_empty_responses_are_counted_and_leave_no_other_trace(rows: list[int]) -> None:
    plain, found = run(whiten_advantages=True), run(rows, whiten_advantages=True)
    for a, b in zip(plain[:3], found[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found.metrics == {**plain.metrics, "advantages/empty_responses": 1}


def test_only_empty_responses() -> None:
    found = run([-1, -1], whiten_advantages=True, whiten_rewards=True)
    assert found.advantages.shape == found.returns.shape == found.rewards.shape == (0,)
    assert found.metrics == {**dict.fromkeys(found.metrics, 0), "advantages/empty_responses": 2}


def test_score_penalty_and_clip_reach_the_reward() -> None:
    one = np.array([0.0])
    found = estimate(
        one, one, one, np.array([5.0]), np.array([False]), np.array([0, 1]),
        **{**PARAMS, "missing_eos_penalty": 1.0, "score_clip": 2.0},
    )  # fmt: skip
    assert found.rewards.tolist() == [1.0]
    assert found.metrics["objective/scores_final"] == 1.0
