"""Checks on flat arrays and their offsets, and that tests check shapes at run time."""

import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
import numpy as np
import pytest

from rlhf_core.algorithms.advantages import gae
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.mismatch import mismatch_sums
from rlhf_core.algorithms.ragged import lengths
from rlhf_core.algorithms.rewards import final_scores
from rlhf_core.algorithms.statistics import explained_variance, pair_statistics
from rlhf_core.errors import RowMismatch

TWO, THREE = np.zeros(2), np.zeros(3)


def test_lengths() -> None:
    np.testing.assert_array_equal(lengths(np.array([0, 2, 2, 3])), [2, 0, 1])


def test_annotated_shapes_and_dtypes_are_checked_in_tests() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        kl_estimate(TWO, THREE, estimator="k1")
    with pytest.raises(jaxtyping.TypeCheckError):
        kl_estimate(np.zeros(2, np.int64), np.zeros(2, np.int64), estimator="k1")


@pytest.mark.parametrize(
    ("function", "arguments", "keywords", "message"),
    [
        (kl_estimate, (TWO, THREE), {"estimator": "k1"}, "logprobs 2, ref_logprobs 3"),
        (mismatch_sums, (TWO, THREE), {}, "sampler_logprobs 2, logprobs 3"),
        (gae, (TWO, THREE, np.array([0, 2])), {"gamma": 1.0, "gae_lambda": 1.0}, "rewards 2, values 3"),
        (
            final_scores,
            (TWO, np.zeros(3, bool)),
            {"missing_eos_penalty": 0.0, "missing_eos_mode": "subtract", "score_clip": None},
            "scores 2, finished 3",
        ),
        (explained_variance, (TWO, THREE), {}, "values 2, returns 3"),
        (pair_statistics, (TWO, THREE), {}, "chosen 2, rejected 3"),
    ],
)
def test_lengths_that_differ_are_refused_by_name(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], message: str
) -> None:
    # Without the run-time check of the tests, as in a stage.
    with pytest.raises(RowMismatch, match=message):
        inspect.unwrap(function)(*arguments, **keywords)
