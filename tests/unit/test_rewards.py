"""Token rewards and final scores.

Mutations that must fail here: sign of the KL; score on the first token, or one token late; a score written at index -1
for a response without tokens; penalty for finished responses; clip after the penalty; modes exchanged; inputs changed
in place.
"""

from typing import Any

import numpy as np
import pytest

from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.rewards import final_scores, overlong_penalties, token_rewards
from rlhf_core.errors import RowMismatch

SUBTRACT: dict[str, Any] = {"missing_eos_penalty": 1.0, "missing_eos_mode": "subtract"}


def test_penalty_lowers_what_the_policy_prefers_and_score_lands_on_the_last_real_token() -> None:
    # d = [0.5, -1, 0]; -0.1 d = [-0.05, 0.1, 0]; the score 2 goes on the third token, not into the next response.
    logprobs, ref = np.array([-1, -2, -0.5, -1, -1]), np.array([-1.5, -1, -0.5, -1, -1])
    kl = kl_estimate(logprobs, ref, estimator="k1")
    rewards = token_rewards(kl, np.array([2.0, 0.0]), np.array([0, 3, 5]), kl_coef=0.1)
    np.testing.assert_allclose(rewards, [-0.05, 0.1, 2.0, 0, 0], rtol=1e-12, atol=0)


def test_response_that_fills_the_batch_width() -> None:
    rewards = token_rewards(np.array([0.5, -1, 0]), np.array([2.0]), np.array([0, 3]), kl_coef=0.1)
    np.testing.assert_allclose(rewards, [-0.05, 0.1, 2.0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("empty_at", [0, 1, 2])
def test_score_of_a_response_without_tokens_goes_nowhere(empty_at: int) -> None:
    lengths, scores = [2, 1], [1.0, 5.0]
    lengths.insert(empty_at, 0)
    scores.insert(empty_at, 7.0)
    offsets = np.cumsum([0, *lengths])
    rewards = token_rewards(np.zeros(3), np.array(scores), offsets, kl_coef=1.0)
    np.testing.assert_array_equal(rewards, [0, 1, 5])


def test_only_empty_responses() -> None:
    assert token_rewards(np.empty(0), np.array([7.0]), np.array([0, 0]), kl_coef=1.0).shape == (0,)


def test_missing_eos_penalty_is_subtracted_once_from_unfinished_responses() -> None:
    scores, finished = np.array([0.4, 0.4, 0.4]), np.array([True, True, False])
    final = final_scores(scores, finished, score_clip=None, **SUBTRACT)
    np.testing.assert_allclose(final, [0.4, 0.4, -0.6], rtol=1e-12, atol=0)
    np.testing.assert_array_equal(scores, [0.4, 0.4, 0.4])


def test_clip_bounds_the_score_and_leaves_the_penalty_whole() -> None:
    scores, finished = np.array([3.0, -3.0, 3.0, -3.0]), np.array([True, True, False, False])
    final = final_scores(scores, finished, score_clip=2.0, **SUBTRACT)
    np.testing.assert_array_equal(final, [2, -2, 1, -3])


@pytest.mark.parametrize(
    ("mode", "expected"),
    # Clipped at 2 first: [2, 2, -2]; the first ended by itself.
    [("subtract", [2, 1.75, -2.25]), ("replace", [2, -0.25, -0.25]), ("scale", [2, 1.5, -1.5])],
)
def test_modes_of_the_missing_eos_penalty(mode: Any, expected: list[float]) -> None:
    scores, finished = np.array([3.0, 3.0, -3.0]), np.array([True, False, False])
    final = final_scores(scores, finished, score_clip=2.0, missing_eos_penalty=0.25, missing_eos_mode=mode)
    np.testing.assert_array_equal(final, expected)


@pytest.mark.parametrize("mode", ["subtract", "replace", "scale"])
def test_a_missing_eos_penalty_of_zero_is_off(mode: Any) -> None:
    scores = np.array([3.0, -3.0])
    final = final_scores(scores, np.zeros(2, bool), score_clip=None, missing_eos_penalty=0.0, missing_eos_mode=mode)
    np.testing.assert_array_equal(final, scores)


def test_overlong_penalty_grows_over_the_buffer_and_no_further() -> None:
    # Buffer 4 below 10: free up to 6 tokens, then a quarter of the penalty of 2 for each token, all of it from 10 on.
    lengths = np.array([0, 6, 7, 9, 10, 12])
    found = overlong_penalties(lengths, max_new_tokens=10, overlong_buffer=4, overlong_penalty=2.0)
    np.testing.assert_array_equal(found, [0, 0, 0.5, 1.5, 2, 2])
    off = overlong_penalties(lengths, max_new_tokens=10, overlong_buffer=0, overlong_penalty=2.0)
    np.testing.assert_array_equal(off, np.zeros(6))


def test_float32_scores_are_not_rounded_by_the_penalty() -> None:
    final = final_scores(np.array([1e-9], np.float32), np.array([False]), score_clip=None, **SUBTRACT)
    assert final[0] == pytest.approx(1e-9 - 1, rel=1e-15)


def test_offsets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RowMismatch, match="expected 3 for 2 rows, found 2"):
        token_rewards(np.zeros(3), np.zeros(2), np.array([0, 3]), kl_coef=1.0)
    with pytest.raises(RowMismatch, match="to the 3 flat values, found 0 to 2"):
        token_rewards(np.zeros(3), np.zeros(1), np.array([0, 2]), kl_coef=1.0)


def test_inputs_are_left_as_they_are() -> None:
    kl, scores = np.array([0.5, 0.5]), np.array([1.0])
    token_rewards(kl, scores, np.array([0, 2]), kl_coef=1.0)
    np.testing.assert_array_equal(kl, [0.5, 0.5])
