"""KL estimators. Numbers: float64 hand sums of d, d^2 / 2 and exp(-d) - 1 + d.

Mutations that must fail here: ref - logprobs; k3 with exp(d); no bound; no expm1; subtraction in float32.
"""

import numpy as np
import pytest

from rlhf_core.algorithms.kl import clipped, kl_estimate

D = np.array([0, 0.5, -0.5, 20, -20, 100, -100], np.float32)
ZERO = np.zeros_like(D)


def test_k1_is_the_log_ratio_of_policy_over_reference() -> None:
    np.testing.assert_array_equal(kl_estimate(D, ZERO, estimator="k1"), [0, 0.5, -0.5, 20, -20, 100, -100])


def test_k2_is_half_the_square() -> None:
    np.testing.assert_array_equal(kl_estimate(D, ZERO, estimator="k2"), [0, 0.125, 0.125, 200, 200, 5000, 5000])


def test_k3_at_small_and_large_log_ratios() -> None:
    # exp(100) would be 2.688e43 and infinite in float32; bounded at 20 it is exp(20) - 1 - 20.
    expected = [0, 0.10653066, 0.14872127, 19.000000002, 485165174.4, 99, 485165174.4]
    np.testing.assert_allclose(kl_estimate(D, ZERO, estimator="k3"), expected, rtol=1e-7, atol=0)


def test_absolute_is_the_size_of_the_log_ratio() -> None:
    np.testing.assert_array_equal(kl_estimate(D, ZERO, estimator="absolute"), [0, 0.5, 0.5, 20, 20, 100, 100])


def test_the_bound_of_k3_is_the_one_given() -> None:
    # exp(10) - 1 - 10 = 22015.4658; without a bound exp(100) - 101 = 2.688e43.
    ten = kl_estimate(D, ZERO, estimator="k3", log_ratio_bound=10.0)
    np.testing.assert_allclose(ten, [0, 0.10653066, 0.14872127, 19.000000002, 22015.4658, 99, 22015.4658], rtol=1e-7)
    free = kl_estimate(D, ZERO, estimator="k3", log_ratio_bound=None)
    assert free[6] == pytest.approx(2.6881171418161356e43, rel=1e-12)
    assert kl_estimate(np.array([-800.0]), np.zeros(1), estimator="k3", log_ratio_bound=None)[0] == np.inf


def test_clipped_bounds_both_sides() -> None:
    np.testing.assert_array_equal(clipped(D, bound=10.0), [0, 0.5, -0.5, 10, -10, 10, -10])
    np.testing.assert_array_equal(clipped(D, bound=None), D)


def test_k3_keeps_its_digits_near_zero() -> None:
    d = np.array([-1e-4], np.float32)
    assert kl_estimate(d, np.zeros(1, np.float32), estimator="k3")[0] == pytest.approx(5.00017e-9, rel=1e-5, abs=0)
    # d^2 / 2 - d^3 / 6; exp(-d) - 1 + d written out is wrong in the fourth digit here, even in float64.
    tiny = kl_estimate(np.array([1e-6]), np.zeros(1), estimator="k3")[0]
    assert tiny == pytest.approx(5e-13 - 1e-18 / 6, rel=1e-8, abs=0)


def test_k3_is_never_negative() -> None:
    d = np.concatenate([[10.0**-n, -(10.0**-n)] for n in range(1, 18)])
    assert kl_estimate(d, np.zeros_like(d), estimator="k3").min() >= 0


def test_difference_is_taken_in_float64() -> None:
    # Two neighbouring float32 numbers near -20 and a reference near 0: float32 would round the difference.
    logprobs, ref = np.array([-20.000002], np.float32), np.array([-1e-7], np.float32)
    expected = float(logprobs[0]) - float(ref[0])
    assert kl_estimate(logprobs, ref, estimator="k1")[0] == expected


def test_the_sum_over_one_response_may_be_negative() -> None:
    logprobs, ref = np.array([-1, -2, -0.5]), np.array([-1.5, -1, -0.5])
    assert kl_estimate(logprobs, ref, estimator="k1").sum() == -0.5


def test_no_tokens() -> None:
    assert kl_estimate(np.empty(0), np.empty(0), estimator="k3").shape == (0,)
