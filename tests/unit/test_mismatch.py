"""Sampler against trainer. Numbers: float64 hand sums.

Mutations that must fail here: d with the other sign; ess not divided by N; clip_fraction one-sided; k3 with exp(d).
"""

import math

import numpy as np
import pytest

from rlhf_core.algorithms.mismatch import mismatch
from tests.reference import oracles


def test_four_tokens_by_hand() -> None:
    # d = [-0.1, -1.3, 1, 0]; w = exp(-d) = [1.105171, 3.669297, 0.367879, 1], sum 6.142347, squares 15.820478.
    # exp(-d) - 1 + d = [0.005171, 1.369297, 0.367879, 0].
    sampler, trainer = np.array([-1.1, -1.5, -2.0, -0.5]), np.array([-1.0, -0.2, -3.0, -0.5])
    assert mismatch(sampler, trainer) == pytest.approx(
        {
            "k1": -0.1,
            "k3": 1.742347 / 4,
            "mean_abs": 0.6,
            "max_abs": 1.3,
            "clip_fraction": 0.5,
            "ess": 6.142347**2 / (4 * 15.820478),
        },
        rel=1e-6,
    )


def test_agreement_is_zero_and_a_full_sample() -> None:
    logprobs = np.array([-1.0, -0.2], np.float32)
    expected = {"k1": 0, "k3": 0, "mean_abs": 0, "max_abs": 0, "clip_fraction": 0, "ess": 1}
    assert mismatch(logprobs, logprobs.copy()) == expected
    assert mismatch(np.empty(0), np.empty(0)) == expected


def test_a_temperature_on_one_side_only_shows_on_every_token() -> None:
    # Logits [2, 1, 0], token 1: -1.407606 raw, -2.142932 at temperature 0.5; w = exp(-0.735326) = 0.479349.
    raw, cooled = oracles.log_softmax([2, 1, 0], 1.0)[1], oracles.log_softmax([2, 1, 0], 0.5)[1]
    found = mismatch(np.full(3, raw), np.full(3, cooled))
    assert found["clip_fraction"] == 1
    assert found["k3"] == pytest.approx(0.479349 - 1 + 0.735326, abs=2e-6)
    assert mismatch(np.full(3, cooled), np.full(3, cooled))["clip_fraction"] == 0


def test_all_figures_stay_finite_where_the_two_have_nothing_in_common() -> None:
    found = mismatch(np.array([-1000, 0, -1], np.float32), np.array([0, -1000, -1], np.float32))
    assert all(math.isfinite(value) for value in found.values())
    assert found["max_abs"] == 1000
    assert found["ess"] == pytest.approx(1 / 3, rel=1e-6)
