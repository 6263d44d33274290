"""Importance weights between sampler and trainer, by hand.

Mutations that must fail here: ratio inverted; cap from below too; band or sequence mean of the wrong ratios; a response
kept because its tokens are in the band one by one; empty responses rejected; log-ratios unbounded.
"""

from typing import Any

import numpy as np
import pytest

from rlhf_core.algorithms.moments import summary
from rlhf_core.algorithms.off_policy import correction_metrics, importance_weights
from rlhf_core.errors import RowMismatch

# Trainer less sampler: [0.1, 1.3, -1, 0], so w = [1.105171, 3.669297, 0.367879, 1]. First response: the first two
# tokens, log-ratios 0.1 and 1.3, mean 0.7: g = 2.013753. Second: -1 and 0, mean -0.5: g = 0.606531.
LOGPROBS, SAMPLER = np.array([-1.0, -0.2, -3.0, -0.5]), np.array([-1.1, -1.5, -2.0, -0.5])
OFFSETS = np.array([0, 2, 2, 4])


def run(
    correction: Any,
    low: float = 0.5,
    high: float = 2.0,
    *,
    sampler: np.ndarray = SAMPLER,
    logprobs: np.ndarray = LOGPROBS,
    offsets: np.ndarray = OFFSETS,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Weights, and the metrics of responses that are in memory as one part."""
    found = importance_weights(
        sampler, logprobs, offsets, correction=correction, correction_min=low, correction_max=high
    )
    cut = {"zeroed": int((found.weights == 0).sum()), "truncated": found.truncated, "rejected": found.rejected}
    return found.weights, correction_metrics(summary(found.weights), **cut)


def test_none_is_one_everywhere() -> None:
    weights, metrics = run("none")
    assert weights.tolist() == [1, 1, 1, 1]
    assert metrics == {
        "correction/weight_mean": 1,
        "correction/zeroed_fraction": 0,
        "correction/truncated_fraction": 0,
        "correction/rejected_responses": 0,
        "correction/ess": 1,
    }


def test_truncate_caps_from_above_only() -> None:
    weights, metrics = run("truncate")
    np.testing.assert_allclose(weights, [1.105171, 2, 0.367879, 1], atol=1e-6)
    # Sum 4.473050, squares 1.221403 + 4 + 0.135335 + 1 = 6.356738.
    assert metrics["correction/weight_mean"] == pytest.approx(4.473050 / 4, rel=1e-6)
    assert metrics["correction/ess"] == pytest.approx(4.473050**2 / (4 * 6.356738), rel=1e-6)
    assert (metrics["correction/truncated_fraction"], metrics["correction/zeroed_fraction"]) == (0.25, 0)


def test_mask_leaves_out_tokens_beyond_either_end_of_the_band() -> None:
    weights, metrics = run("mask")
    np.testing.assert_allclose(weights, [1.105171, 0, 0, 1], atol=1e-6)
    assert (metrics["correction/truncated_fraction"], metrics["correction/zeroed_fraction"]) == (0, 0.5)


def test_reject_sequence_goes_by_the_geometric_mean_of_the_response() -> None:
    weights, metrics = run("reject_sequence")
    np.testing.assert_allclose(weights, [0, 0, 0.367879, 1], atol=1e-6)
    assert (metrics["correction/rejected_responses"], metrics["correction/truncated_fraction"]) == (1, 0)
    weights, metrics = run("reject_sequence", high=2.1)
    np.testing.assert_allclose(weights, [1.105171, 2.1, 0.367879, 1], atol=1e-6)
    assert (metrics["correction/rejected_responses"], metrics["correction/truncated_fraction"]) == (0, 0.25)
    weights, metrics = run("reject_sequence", low=0.7)
    assert weights.tolist() == [0, 0, 0, 0]
    # The response without tokens is not rejected: it has no mean.
    assert (metrics["correction/rejected_responses"], metrics["correction/ess"]) == (2, 0)


def test_log_ratios_beyond_20_count_as_20() -> None:
    far = {"sampler": np.array([-500.0, 0]), "logprobs": np.array([0, -500.0]), "offsets": np.array([0, 2])}
    weights, _ = run("truncate", high=1e12, **far)
    np.testing.assert_allclose(weights, [np.exp(20), np.exp(-20)], rtol=1e-12)


def test_no_tokens_and_offsets_that_do_not_fit() -> None:
    nothing = {"sampler": np.empty(0), "logprobs": np.empty(0), "offsets": np.array([0, 0])}
    weights, metrics = run("reject_sequence", **nothing)
    assert weights.size == 0 and metrics["correction/ess"] == 1 and metrics["correction/rejected_responses"] == 0
    with pytest.raises(RowMismatch, match="to the 4 flat values, found 0 to 3"):
        run("reject_sequence", offsets=np.array([0, 3]))
