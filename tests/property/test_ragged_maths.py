"""Laws of the numpy half, on random ragged batches and against loops that share no code with it."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.algorithms.advantages import gae
from rlhf_core.algorithms.estimates import Estimates, estimate
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.mismatch import mismatch
from rlhf_core.algorithms.rewards import token_rewards
from rlhf_core.algorithms.statistics import explained_variance, sequence_mean, sequence_sums
from rlhf_core.algorithms.whitening import whiten
from tests.property.strategies import Batch, batches, flat, numbers, offsets, unit
from tests.reference import oracles

close: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
estimators = st.sampled_from(["k1", "k2", "k3"])
columns = st.lists(numbers(-5, 5), min_size=2, max_size=30)


@given(batches(), estimators)
def test_kl_is_the_decimal_one(batch: Batch, estimator: Any) -> None:
    found = kl_estimate(flat(batch.logprobs), flat(batch.ref_logprobs), estimator=estimator)
    pairs = zip(flat(batch.logprobs), flat(batch.ref_logprobs), strict=True)
    np.testing.assert_allclose(found, [oracles.kl(p, r, estimator) for p, r in pairs], rtol=1e-12, atol=1e-15)
    if estimator != "k1":
        assert (found >= 0).all()


@given(batches(), st.floats(0, 2))
def test_rewards_are_those_of_each_row_alone(batch: Batch, kl_coef: float) -> None:
    found = token_rewards(flat(batch.values), np.array(batch.scores), offsets(batch.values), kl_coef=kl_coef)
    rows = zip(batch.values, batch.scores, strict=True)
    expected = [oracles.rewards(kls, score, kl_coef) for kls, score in rows]
    np.testing.assert_allclose(found, flat(expected), **close)


@given(batches(), st.floats(0, 2))
def test_every_score_of_a_response_with_tokens_is_paid_exactly_once(batch: Batch, kl_coef: float) -> None:
    bounds = offsets(batch.values)
    kl = flat(batch.values)
    paid = sequence_sums(token_rewards(kl, np.array(batch.scores), bounds, kl_coef=kl_coef), bounds)
    due = [score if n else 0 for score, n in zip(batch.scores, batch.lengths, strict=True)]
    np.testing.assert_allclose(paid + kl_coef * sequence_sums(kl, bounds), due, **close)


@given(batches(), unit, unit)
def test_gae_is_the_double_sum(batch: Batch, gamma: float, gae_lambda: float) -> None:
    found = gae(flat(batch.rewards), flat(batch.values), offsets(batch.values), gamma=gamma, gae_lambda=gae_lambda)
    rows = zip(batch.rewards, batch.values, strict=True)
    np.testing.assert_allclose(found, flat([oracles.gae(r, v, gamma, gae_lambda) for r, v in rows]), **close)


@given(batches(), unit)
def test_lambda_one_is_the_discounted_return_minus_v(batch: Batch, gamma: float) -> None:
    found = gae(flat(batch.rewards), flat(batch.values), offsets(batch.values), gamma=gamma, gae_lambda=1.0)
    returns = flat([oracles.discounted_returns(row, gamma) for row in batch.rewards])
    np.testing.assert_allclose(found, returns - flat(batch.values), **close)


@given(batches(), unit)
def test_lambda_zero_is_the_td_error(batch: Batch, gamma: float) -> None:
    found = gae(flat(batch.rewards), flat(batch.values), offsets(batch.values), gamma=gamma, gae_lambda=0.0)
    rows = zip(batch.rewards, batch.values, strict=True)
    np.testing.assert_allclose(found, flat([oracles.td_errors(r, v, gamma) for r, v in rows]), **close)


@given(batches(min_rows=1), unit, unit, st.sampled_from([0.0, 9.0, 1e30, np.nan]), st.integers(0, 3))
def test_padding_adds_nothing(batch: Batch, gamma: float, gae_lambda: float, pad: float, extra: int) -> None:
    width = max(1, *batch.lengths) + extra
    mask = np.array([[t < n for t in range(width)] for n in batch.lengths], bool).reshape(-1, width)

    def padded(rows: list[list[float]]) -> np.ndarray:
        return np.array([row + [pad] * (width - len(row)) for row in rows]).reshape(-1, width)

    rewards, values = padded(batch.rewards), padded(batch.values)
    loops = [oracles.gae_padded(r, v, m, gamma, gae_lambda) for r, v, m in zip(rewards, values, mask, strict=True)]
    found = gae(rewards[mask], values[mask], offsets(batch.values), gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(found, np.array(loops).reshape(-1, width)[mask], **close)


PARAMS: dict[str, Any] = {
    "kl_coef": 0.05,
    "missing_eos_penalty": 1.0,
    "score_clip": 3.0,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "whiten_rewards": True,
    "whiten_advantages": True,
}


def estimated(batch: Batch, estimator: Any, order: list[int]) -> Estimates:
    rows = [[column[i] for i in order] for column in batch]
    logprobs, ref_logprobs, values, _, scores = rows
    finished = np.array([len(row) % 2 == 0 for row in values], bool)
    return estimate(
        flat(logprobs),
        flat(ref_logprobs),
        flat(values),
        np.array(scores, np.float64),
        finished,
        offsets(values),
        kl_estimator=estimator,
        **PARAMS,
    )


@given(batches(), estimators, st.randoms(use_true_random=False))
def test_order_of_rows_is_irrelevant(batch: Batch, estimator: Any, random: Any) -> None:
    order = list(range(len(batch.scores)))
    random.shuffle(order)
    plain, shuffled = estimated(batch, estimator, sorted(order)), estimated(batch, estimator, order)
    bounds = offsets(batch.values)
    for before, after in zip(plain[:3], shuffled[:3], strict=True):
        expected = [before[bounds[i] : bounds[i + 1]].tolist() for i in order]
        np.testing.assert_allclose(after, flat(expected), rtol=1e-7, atol=1e-7)
    for name, value in plain.metrics.items():
        np.testing.assert_allclose(shuffled.metrics[name], value, rtol=1e-7, atol=1e-7)


@given(batches(), unit, unit, st.data())
def test_any_cut_into_shards_gives_the_same_rewards_and_gae(
    batch: Batch, gamma: float, gae_lambda: float, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(batch.scores)))
    parts = [slice(0, cut), slice(cut, None)]
    whole = gae(flat(batch.rewards), flat(batch.values), offsets(batch.values), gamma=gamma, gae_lambda=gae_lambda)
    pieces = [
        gae(flat(batch.rewards[s]), flat(batch.values[s]), offsets(batch.values[s]), gamma=gamma, gae_lambda=gae_lambda)
        for s in parts
    ]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@given(columns, st.booleans())
def test_whiten_is_the_loop(x: list[float], shift_mean: bool) -> None:
    expected = oracles.whiten(x, shift_mean=shift_mean)
    np.testing.assert_allclose(whiten(np.array(x), shift_mean=shift_mean), expected, rtol=1e-7, atol=1e-7)


@given(columns)
def test_whitened_values_have_mean_zero_and_at_most_unit_variance(x: list[float]) -> None:
    white = whiten(np.array(x), shift_mean=True)
    variance = np.var(x)
    assert abs(white.mean()) < 1e-7
    np.testing.assert_allclose(white.var(), variance / (variance + 1e-8), rtol=1e-7, atol=1e-7)
    assert (np.diff(white[np.argsort(x)]) >= 0).all()


@given(batches())
def test_sums_of_rows(batch: Batch) -> None:
    found = sequence_sums(flat(batch.values), offsets(batch.values))
    np.testing.assert_allclose(found, [sum(row) for row in batch.values], **close)
    filled = [sum(row) for row in batch.values if row]
    expected = sum(filled) / len(filled) if filled else 0.0
    np.testing.assert_allclose(sequence_mean(flat(batch.values), offsets(batch.values)), expected, **close)


@given(st.lists(st.tuples(numbers(-5, 5), numbers(-5, 5)), min_size=2, max_size=30))
def test_explained_variance_is_the_loop(pairs: list[tuple[float, float]]) -> None:
    values, returns = (list(column) for column in zip(*pairs, strict=True))
    if np.var(returns) < 1e-6:
        return
    expected = oracles.explained_variance(values, returns)
    np.testing.assert_allclose(explained_variance(np.array(values), np.array(returns)), expected, rtol=1e-6, atol=1e-6)


@given(batches())
def test_mismatch_keeps_its_ranges(batch: Batch) -> None:
    sampler, trainer = flat(batch.logprobs), flat(batch.ref_logprobs)
    found = mismatch(sampler, trainer)
    assert 0 < found["ess"] <= 1 + 1e-12
    assert 0 <= found["clip_fraction"] <= 1
    assert 0 <= found["mean_abs"] <= found["max_abs"] * (1 + 1e-12)
    assert abs(found["k1"]) <= found["mean_abs"] * (1 + 1e-12)
    assert found["k3"] >= 0


@given(batches(), estimators)
def test_inputs_are_left_as_they_are(batch: Batch, estimator: Any) -> None:
    bounds, scores = offsets(batch.values), np.array(batch.scores, np.float64)
    arrays = [flat(rows) for rows in (batch.logprobs, batch.ref_logprobs, batch.values)]
    finished = np.zeros(scores.size, bool)
    kept = [array.copy() for array in (*arrays, scores, finished, bounds)]
    estimate(*arrays, scores, finished, bounds, kl_estimator=estimator, **PARAMS)
    for before, after in zip(kept, (*arrays, scores, finished, bounds), strict=True):
        np.testing.assert_array_equal(before, after)
