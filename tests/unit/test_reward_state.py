"""Moments of all scores so far, scaling by them, and the adaptive KL coefficient, by hand.

Mutations that must fail here: n - 1 instead of n; a batch's mean taken for the running one; the cross term of two
batches left out; sign of the error; error not clipped; horizon and responses exchanged.
"""

from typing import Any

import numpy as np
import pytest

from rlhf_core.algorithms.reward_state import Moments, adapted_kl_coef, merged, scaled_scores

NOTHING = Moments(0, 0.0, 0.0)


def test_two_batches_have_the_moments_of_all_scores() -> None:
    first = merged(NOTHING, np.array([1.0, 3.0]))
    assert first == Moments(2, 2.0, 2.0)
    # 1, 3, 8, 8: mean 5, squares 16 + 4 + 9 + 9.
    assert merged(first, np.array([8.0, 8.0])) == Moments(4, 5.0, 38.0)
    assert merged(first, np.empty(0)) == first


def test_float32_scores_are_summed_in_float64() -> None:
    found = merged(NOTHING, np.array([10000, 10000.125, 10000.25], np.float32))
    assert found == Moments(3, 10000.125, 2 * 0.125**2)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    # Mean 5, deviation sqrt(38 / 4) = 3.082207.
    [
        ("none", [8, 2]),
        ("running_std", [8 / 9.5**0.5, 2 / 9.5**0.5]),
        ("running_mean_std", [3 / 9.5**0.5, -3 / 9.5**0.5]),
    ],
)
def test_scores_are_scaled_by_the_deviation_of_all_so_far(scaling: Any, expected: list[float]) -> None:
    found = scaled_scores(np.array([8.0, 2.0]), Moments(4, 5.0, 38.0), score_scaling=scaling)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("value", [0.1, 7.0, 1e8 / 3])
def test_scores_that_are_all_equal_are_divided_by_one(value: float) -> None:
    moments = merged(merged(NOTHING, np.full(7, value)), np.full(3, value))
    np.testing.assert_allclose(
        scaled_scores(np.array([value]), moments, score_scaling="running_std"), [value], rtol=1e-12
    )
    shifted = scaled_scores(np.array([value]), moments, score_scaling="running_mean_std")
    np.testing.assert_allclose(shifted, [0], atol=1e-7)


def test_without_any_score_nothing_is_scaled() -> None:
    assert scaled_scores(np.array([3.0]), NOTHING, score_scaling="running_mean_std").tolist() == [3]


@pytest.mark.parametrize(
    ("kl", "expected"),
    # Target 6, horizon 100, 10 responses, coefficient 0.5: 0.5 * (1 + e / 10).
    [(6.0, 0.5), (6.6, 0.505), (5.4, 0.495), (60.0, 0.51), (-60.0, 0.49)],
)
def test_the_coefficient_follows_the_clipped_error(kl: float, expected: float) -> None:
    found = adapted_kl_coef(0.5, kl=kl, responses=10, kl_target=6.0, kl_horizon=100)
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_coefficient_never_turns_negative() -> None:
    assert adapted_kl_coef(0.5, kl=0.0, responses=1000, kl_target=6.0, kl_horizon=100) == 0
