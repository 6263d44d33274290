"""GAE over ragged rows.

Mutations that must fail here: V carried in from the next row; A carried over; gamma or lambda dropped; V after the last
token not 0; shift by one token; recursion in float32; rows of length 0 or 1 skipped wrongly; inputs overwritten.
"""

import numpy as np
import pytest

from rlhf_core.algorithms.advantages import gae
from rlhf_core.errors import RowMismatch
from tests.reference import oracles

# Three rows of 4, 1 and 2 tokens. gamma 0.99, lambda 0.9.
# Row 0, backwards: 1 - 0.3 = 0.7; 0 + 0.99*0.3 - 0.4 + 0.891*0.7 = 0.5207; 0.2 + 0.99*0.4 - 0.1 + 0.891*0.5207
# = 0.9599437; -0.1 + 0.99*0.1 - 0.2 + 0.891*0.9599437 = 0.65430984. Row 1: -1.5 - 0.25. Row 2: 0.7 - 0.6 = 0.1;
# 0.1 + 0.99*0.6 + 0.2 + 0.891*0.1 = 0.9831.
REWARDS = [[-0.1, 0.2, 0, 1], [-1.5], [0.1, 0.7]]
VALUES = [[0.2, 0.1, 0.4, 0.3], [0.25], [-0.2, 0.6]]
ADVANTAGES = [[0.65430984, 0.95994370, 0.5207, 0.7], [-1.75], [0.9831, 0.1]]
RETURNS = [[0.85430984, 1.05994370, 0.9207, 1.0], [-1.5], [0.7831, 0.7]]


def flat(rows: list[list[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row], np.float64)


def offsets(rows: list[list[float]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)])


@pytest.mark.parametrize("poison", [7.0, -9.0, 1e30, np.nan])
def test_padded_values_never_bootstrap_real_tokens(poison: float) -> None:
    # gamma 1, lambda 0.95: 2 - 0.3 = 1.7; 0.3 - 0.4 + 0.95*1.7 = 1.515; 0.4 - 0.5 + 0.95*1.515 = 1.33925.
    mask = np.array([1, 1, 1, 0, 0], bool)
    rewards, values = np.array([0, 0, 2, poison, poison]), np.array([0.5, 0.4, 0.3, poison, poison])
    advantages = gae(rewards[mask], values[mask], np.array([0, 3]), gamma=1.0, gae_lambda=0.95)
    np.testing.assert_allclose(advantages, [1.33925, 1.515, 1.7], rtol=1e-12, atol=0)
    np.testing.assert_allclose(advantages + values[mask], [1.83925, 1.915, 2.0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_ragged_batch_with_a_one_token_row_in_any_order(order: list[int]) -> None:
    rewards, values, expected = ([rows[i] for i in order] for rows in (REWARDS, VALUES, ADVANTAGES))
    found = gae(flat(rewards), flat(values), offsets(rewards), gamma=0.99, gae_lambda=0.9)
    np.testing.assert_allclose(found, flat(expected), rtol=1e-8, atol=0)
    np.testing.assert_allclose(found + flat(values), flat([RETURNS[i] for i in order]), rtol=1e-8, atol=0)


def test_rows_without_tokens_change_nothing() -> None:
    bounds = np.array([0, 0, 4, 5, 5, 5, 7, 7])
    found = gae(flat(REWARDS), flat(VALUES), bounds, gamma=0.99, gae_lambda=0.9)
    np.testing.assert_allclose(found, flat(ADVANTAGES), rtol=1e-8, atol=0)


def test_no_rows_and_no_tokens() -> None:
    for bounds in ([0], [0, 0, 0]):
        found = gae(np.empty(0), np.empty(0), np.array(bounds), gamma=1.0, gae_lambda=1.0)
        assert found.shape == (0,)


def test_one_row_per_call_is_the_same_as_all_rows_at_once() -> None:
    alone = [
        gae(flat([r]), flat([v]), np.array([0, len(r)]), gamma=0.99, gae_lambda=0.9)
        for r, v in zip(REWARDS, VALUES, strict=True)
    ]
    together = gae(flat(REWARDS), flat(VALUES), offsets(REWARDS), gamma=0.99, gae_lambda=0.9)
    np.testing.assert_array_equal(np.concatenate(alone), together)


def test_float32_input_is_accumulated_in_float64() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 3000)).astype(np.float32)
    found = gae(rewards, values, np.array([0, 3000]), gamma=1.0, gae_lambda=0.999)
    expected = oracles.gae(rewards.astype(float).tolist(), values.astype(float).tolist(), 1.0, 0.999)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-11)


def test_read_only_input_is_accepted_and_unchanged() -> None:
    rewards, values = flat(REWARDS), flat(VALUES)
    rewards.setflags(write=False)
    values.setflags(write=False)
    gae(rewards, values, offsets(REWARDS), gamma=0.99, gae_lambda=0.9)
    np.testing.assert_array_equal(rewards, flat(REWARDS))
    np.testing.assert_array_equal(values, flat(VALUES))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 2, 1, 3], "row 1 has the negative length -1"),
        ([0, 2], "to the 3 flat values, found 0 to 2"),
        ([1, 3], "found 1 to 3"),
        ([], "found nothing"),
    ],
)
def test_offsets_that_do_not_fit_are_refused_before_memory_is_touched(bounds: list[int], message: str) -> None:
    with pytest.raises(RowMismatch, match=message):
        gae(np.zeros(3), np.zeros(3), np.array(bounds, np.int64), gamma=1.0, gae_lambda=1.0)
