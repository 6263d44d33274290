"""Means, sums per response, explained variance and pair accuracy.

Mutations that must fail here: empty rows counted; reduceat's quirk at empty rows; ties as wins; n - 1; sums in float32.
"""

import numpy as np
import pytest

from rlhf_core.algorithms.statistics import (
    clustered_interval,
    explained_variance,
    mean_and_std,
    pair_statistics,
    sequence_mean,
    sequence_sums,
    token_mean,
)
from rlhf_core.errors import RowMismatch


@pytest.mark.parametrize(
    ("bounds", "sums"),
    [
        ([0, 3, 4], [6, 4]),
        ([0, 0, 3, 3, 3, 4, 4], [0, 6, 0, 0, 4, 0]),
        ([0, 0, 4], [0, 10]),
        ([0, 4, 4], [10, 0]),
    ],
)
def test_sums_of_rows_with_empty_rows_anywhere(bounds: list[int], sums: list[float]) -> None:
    np.testing.assert_array_equal(sequence_sums(np.array([1.0, 2, 3, 4]), np.array(bounds)), sums)


def test_sums_of_no_tokens() -> None:
    np.testing.assert_array_equal(sequence_sums(np.empty(0), np.array([0, 0, 0])), [0, 0])
    assert sequence_sums(np.empty(0), np.array([0])).shape == (0,)


def test_one_bad_row_does_not_reach_its_neighbours() -> None:
    sums = sequence_sums(np.array([1.0, np.nan, 2, 3]), np.array([0, 1, 2, 4]))
    np.testing.assert_array_equal(sums, [1, np.nan, 5])


def test_mean_over_tokens_and_mean_over_responses_of_sums_differ() -> None:
    # d = [-0.2, 0.1, 0.5 | 0.2]: 0.6 / 4 = 0.15 a token; (0.4 + 0.2) / 2 = 0.30 a response.
    d = np.array([-0.2, 0.1, 0.5, 0.2])
    assert token_mean(d) == pytest.approx(0.15, rel=1e-12)
    assert sequence_mean(d, np.array([0, 3, 4])) == pytest.approx(0.30, rel=1e-12)
    assert sequence_mean(d, np.array([0, 3, 3, 4])) == pytest.approx(0.30, rel=1e-12)


def test_mean_and_population_deviation() -> None:
    assert mean_and_std(np.array([1.0, 2, 6])) == pytest.approx((3, (14 / 3) ** 0.5), rel=1e-12)
    assert mean_and_std(np.empty(0)) == (0.0, 0.0)
    assert sequence_mean(np.empty(0), np.array([0, 0])) == 0.0


def test_float32_is_summed_in_float64() -> None:
    x = np.full(2**20, 0.1, np.float32)
    x[0] = 2**24
    exact = 2**24 + (2**20 - 1) * float(np.float32(0.1))
    assert sequence_sums(x, np.array([0, 2**20]))[0] == pytest.approx(exact, rel=1e-12)
    assert token_mean(x) == pytest.approx(exact / 2**20, rel=1e-12)


def test_offsets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RowMismatch, match="to the 3 flat values, found 0 to 4"):
        sequence_sums(np.zeros(3), np.array([0, 4]))


def test_explained_variance() -> None:
    # returns [1, 3, 5], var 8/3. Errors [0, 0, 3]: var 2. 1 - 2 * 3/8 = 0.25. A constant offset costs nothing.
    returns = np.array([1.0, 3, 5])
    assert explained_variance(np.array([1.0, 3, 2]), returns) == pytest.approx(0.25, rel=1e-12)
    assert explained_variance(returns + 7, returns) == pytest.approx(1.0, rel=1e-12)
    assert explained_variance(np.zeros(3), returns) == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0, rel=1e-12)


def test_explained_variance_is_finite_where_it_is_not_defined() -> None:
    assert explained_variance(np.array([1.0, 2]), np.array([0.1, 0.1])) == 0.0
    assert explained_variance(np.array([1.0]), np.array([2.0])) == 0.0
    assert explained_variance(np.empty(0), np.empty(0)) == 0.0


def test_a_tie_is_no_win() -> None:
    chosen, rejected = np.array([1.2, 0.5, 0.3, 2.0]), np.array([0.2, 0.5, 0.9, 2.0])
    assert pair_statistics(chosen, rejected) == pytest.approx(
        {"accuracy": 0.25, "accuracy_ties_half": 0.5, "ties": 2, "margin_mean": 0.1}, rel=1e-12
    )
    empty = {"accuracy": 0, "accuracy_ties_half": 0, "ties": 0, "margin_mean": 0}
    assert pair_statistics(np.empty(0), np.empty(0)) == empty


def test_the_clustered_interval_draws_whole_clusters() -> None:
    # Clusters "a" = (0, 0, 0) and "b" = (1): a resample is aa, ab, ba or bb, with means 0, 1/4, 1/4, 1.
    options = {"seed": 0, "resamples": 4000, "confidence": 0.9}
    x, clusters = np.array([0.0, 1.0, 0.0, 0.0]), ["a", "b", "a", "a"]
    assert clustered_interval(x, clusters, **options) == (0.0, 1.0)  # each is a quarter of all: more than a tail
    assert clustered_interval(x, clusters, **options | {"confidence": 0.4}) == (0.25, 0.25)  # the middle half
    assert clustered_interval(np.empty(0), [], **options) == (0.0, 0.0)


def test_the_clustered_interval_is_a_function_of_its_seed() -> None:
    x, clusters = np.arange(50.0), [str(index // 3) for index in range(50)]
    found = [clustered_interval(x, clusters, seed=seed, resamples=200, confidence=0.95) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
