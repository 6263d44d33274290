"""Whitening. Numbers: population variance, and n - 1 where a test says so; epsilon 1e-8 under the root.

Mutations that must fail here: n - 1 instead of n, or the other way round; epsilon added where it is a floor; mean not
removed, or added back; per-shard statistics; float32 sums; NaN turned into 0.
"""

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlhf_core.algorithms.moments import summary
from rlhf_core.algorithms.whitening import whiten as whiten_part
from rlhf_core.errors import NumericError


def any_whiten(x: np.ndarray, **keywords: Any) -> np.ndarray:
    return whiten_part(x, summary(x), **keywords)


whiten = partial(any_whiten, variance="population", epsilon="added")
bessel = partial(any_whiten, variance="bessel", epsilon="added")
floored = partial(any_whiten, variance="population", epsilon="floor")


def test_population_variance() -> None:
    # mean 3, var (4 + 1 + 9) / 3 = 4.6667.
    np.testing.assert_allclose(
        whiten(np.array([1.0, 2, 6]), shift_mean=True), [-0.925820, -0.462910, 1.388730], atol=5e-7
    )


def test_scale_only_puts_the_mean_back() -> None:
    np.testing.assert_allclose(
        whiten(np.array([1.0, 2, 6]), shift_mean=False), [2.074180, 2.537090, 4.388730], atol=5e-7
    )


def test_bessel_variance() -> None:
    # mean 3, var (4 + 1 + 9) / 2 = 7.
    x = np.array([1.0, 2, 6])
    np.testing.assert_allclose(bessel(x, shift_mean=True), [-0.755929, -0.377964, 1.133893], atol=5e-7)
    np.testing.assert_allclose(bessel(x, shift_mean=False), [2.244071, 2.622036, 4.133893], atol=5e-7)


def test_epsilon_is_added_to_the_variance_or_the_least_it_may_be() -> None:
    # mean 0, var 1e-8: added sqrt(2e-8), floor sqrt(1e-8). With var 1 the floor changes nothing.
    x = np.array([1e-4, -1e-4])
    np.testing.assert_allclose(whiten(x, shift_mean=True), x / 2e-8**0.5, rtol=1e-12)
    np.testing.assert_allclose(floored(x, shift_mean=True), [1, -1], rtol=1e-12)
    np.testing.assert_allclose(floored(x / 10, shift_mean=True), [0.1, -0.1], rtol=1e-12)
    np.testing.assert_array_equal(floored(np.array([1.0, -1.0]), shift_mean=True), [1, -1])


def test_masked_values_do_not_exist_for_it() -> None:
    padded, mask = np.array([1.0, 2, 6, 1000]), np.array([True, True, True, False])
    np.testing.assert_allclose(whiten(padded[mask], shift_mean=True), [-0.925820, -0.462910, 1.388730], atol=5e-7)


@pytest.mark.parametrize("variance", ["population", "bessel"])
@pytest.mark.parametrize("epsilon", ["added", "floor"])
def test_one_token_gives_zero_and_a_warning(caplog: pytest.LogCaptureFixture, variance: Any, epsilon: Any) -> None:
    with caplog.at_level(logging.WARNING):
        found = any_whiten(np.array([4.2]), shift_mean=True, variance=variance, epsilon=epsilon)
    np.testing.assert_array_equal(found, [0])
    assert "single token" in caplog.text
    found = any_whiten(np.array([4.2]), shift_mean=False, variance=variance, epsilon=epsilon)
    np.testing.assert_array_equal(found, [4.2])


@pytest.mark.parametrize("value", [3.0, 0.1, 1e8 / 3])
def test_equal_values_give_exactly_zero(value: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for of_kind in (whiten, bessel, floored):
            np.testing.assert_array_equal(of_kind(np.full(7, value), shift_mean=True), np.zeros(7))
    assert not caplog.records


def test_no_tokens_stay_no_tokens() -> None:
    assert whiten(np.empty(0, np.float32), shift_mean=True).shape == (0,)
    assert whiten(np.empty(0), shift_mean=False).shape == (0,)


def test_statistics_of_a_ragged_batch_run_over_all_its_tokens() -> None:
    # The seven advantages of test_advantages: mean 0.30972193, var 0.78260481.
    x = np.array([0.65430984, 0.95994370, 0.5207, 0.7, -1.75, 0.9831, 0.1])
    expected = [0.389519, 0.735005, 0.238488, 0.441167, -2.328291, 0.761181, -0.237068]
    np.testing.assert_allclose(whiten(x, shift_mean=True), expected, atol=1e-6)
    # var 0.91303894 with n - 1.
    expected = [0.360625, 0.680482, 0.220797, 0.408441, -2.155579, 0.704716, -0.219482]
    np.testing.assert_allclose(bessel(x, shift_mean=True), expected, atol=1e-6)


def test_global_statistics_differ_from_those_of_each_shard() -> None:
    # mean 4, var 12.5. Shard by shard it would be [-1.2247, 0, 1.2247] and [0].
    white = whiten(np.concatenate([np.array([1.0, 2, 3]), np.array([10.0]), np.empty(0)]), shift_mean=True)
    np.testing.assert_allclose(white, [-0.848528, -0.565685, -0.282843, 1.697056], atol=5e-7)
    # var 16.6667 with n - 1.
    white = bessel(np.array([1.0, 2, 3, 10]), shift_mean=True)
    np.testing.assert_allclose(white, [-0.734847, -0.489898, -0.244949, 1.469694], atol=5e-7)


def test_small_spread_on_a_large_mean_in_float32() -> None:
    # float32 sums would lose the spread: 1e4 + [0, 1/8, 1/4] has mean 1e4 + 1/8 and var 1/96.
    x = np.tile(np.array([10000, 10000.125, 10000.25], np.float32), 1000)
    expected = np.tile([-0.125, 0, 0.125], 1000) / np.sqrt(1 / 96 + 1e-8)
    np.testing.assert_allclose(whiten(x, shift_mean=True), expected, rtol=1e-9, atol=1e-9)


def test_a_row_that_was_dropped_leaves_no_trace() -> None:
    scores = np.array([2, np.nan, 4, 6])
    kept = scores[np.isfinite(scores)]
    np.testing.assert_allclose(whiten(kept, shift_mean=True), [-1.224745, 0, 1.224745], atol=5e-7)
    np.testing.assert_allclose(bessel(kept, shift_mean=True), [-1, 0, 1], atol=5e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_stops_it_by_index(bad: float) -> None:
    with pytest.raises(NumericError, match=f"found {bad} at index 1 of 4"):
        whiten(np.array([2, bad, 4, 6]), shift_mean=True)


def test_a_part_is_whitened_by_the_whole_and_a_bad_number_elsewhere_stops_it_too() -> None:
    whole, rules = summary(np.array([1.0, 2, 6])), {"variance": "population", "epsilon": "added"}
    np.testing.assert_allclose(whiten_part(np.array([6.0]), whole, shift_mean=True, **rules), [1.388730], atol=5e-7)  # type: ignore[arg-type]
    with pytest.raises(NumericError, match="found another one in the other responses"):
        whiten_part(np.array([6.0]), summary(np.array([1.0, np.inf])), shift_mean=True, **rules)  # type: ignore[arg-type]


def test_input_is_left_as_it_is() -> None:
    x = np.array([1.0, 2, 6])
    whiten(x, shift_mean=False)
    np.testing.assert_array_equal(x, [1, 2, 6])
