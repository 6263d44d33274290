"""Laws of the numpy half, on random ragged batches and against loops that share no code with it."""

from functools import partial
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.algorithms.advantages import gae, rewards_to_go
from rlhf_core.algorithms.conventions import CONVENTIONS
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.mismatch import mismatch
from rlhf_core.algorithms.moments import EMPTY, row_moments, summary
from rlhf_core.algorithms.off_policy import correction_metrics, importance_weights
from rlhf_core.algorithms.ragged import slotted_offsets, with_slots, without_slots
from rlhf_core.algorithms.reward_state import Moments, merged
from rlhf_core.algorithms.rewards import overlong_penalties, token_rewards
from rlhf_core.algorithms.statistics import explained_variance, sequence_mean, sequence_sums
from rlhf_core.algorithms.whitening import whiten as whiten_part
from tests.iteration import Result, estimated, responses
from tests.property.strategies import Batch, batches, flat, numbers, offsets, unit
from tests.reference import oracles

close: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
kl_estimators = st.sampled_from(["k1", "k2", "k3", "absolute"])
GROUPED = ["rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline"]
estimators = st.sampled_from(["gae", "reward_minus_value", "reinforce_plus_plus", *GROUPED])
conventions = st.sampled_from(list(CONVENTIONS))


def any_whiten(x: np.ndarray, **keywords: Any) -> np.ndarray:
    return whiten_part(x, summary(x), **keywords)


whiten = partial(any_whiten, variance="population", epsilon="added")
columns = st.lists(numbers(-5, 5), min_size=2, max_size=30)


@given(batches(), kl_estimators)
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


@given(batches(), unit)
def test_rewards_to_go_are_the_discounted_returns(batch: Batch, gamma: float) -> None:
    found = rewards_to_go(flat(batch.rewards), offsets(batch.rewards), gamma=gamma)
    np.testing.assert_allclose(found, flat([oracles.discounted_returns(row, gamma) for row in batch.rewards]), **close)


SHAPED: dict[str, Any] = {
    "max_new_tokens": 6,
    "overlong_buffer": 3,
    "missing_eos_penalty": 1.0,
    "score_clip": 3.0,
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "correction": "truncate",
}


def run(batch: Batch, order: list[int], groups: list[int], **changes: Any) -> Result:
    """The whole way for the rows in this order; which of them ended by themselves goes by their length."""
    logprobs, ref_logprobs, values, sampler, scores = ([column[i] for i in order] for column in batch)
    return estimated(
        responses(
            logprobs,
            ref_logprobs,
            values,
            scores,
            bootstrap=[score / 4 for score in scores],
            sampler=sampler,
            finished=[len(row) % 2 == 0 for row in values],
            groups=[groups[i] for i in order],
        ),
        **{**SHAPED, **changes},
    )


groups_of = st.lists(st.integers(0, 2), min_size=6, max_size=6)


def expected_rewards(batch: Batch, slot: bool) -> tuple[list[list[float]], list[list[float]], list[bool]]:
    """Rewards and values of each row as lists, a slot as one item more, and which rows have one."""
    rows, values, slots = [], [], []
    for place, score in enumerate(batch.scores):
        n = batch.lengths[place]
        final = max(-3.0, min(3.0, score)) - (n % 2) - oracles.overlong_penalty(n, 6, 3, 1.0)
        pairs = zip(batch.logprobs[place], batch.ref_logprobs[place], strict=True)
        kls = [oracles.kl(p, r, "k1") for p, r in pairs]
        slots.append(slot and 0 < n < 6)
        rows.append(oracles.rewards(kls + [0.0] * slots[-1], final, 0.05))
        values.append(batch.values[place] + [score / 4] * slots[-1])
    return rows, values, slots


@given(batches(), estimators, st.sampled_from(["ours", "trl", "verl"]), groups_of, st.none() | unit)
def test_every_estimator_is_its_definition(
    batch: Batch, estimator: str, convention: str, groups: list[int], value_gae_lambda: float | None
) -> None:
    changes = {"estimator": estimator, "conventions": convention, "value_gae_lambda": value_gae_lambda}
    found = run(batch, list(range(len(batch.scores))), groups, **changes).estimates
    rows, values, slots = expected_rewards(batch, convention == "trl")
    advantages, returns, at_end = [], [], []
    for i, row in enumerate(rows):
        others = [sum(r) for j, r in enumerate(rows) if j != i and groups[j] == groups[i] and batch.values[j]]
        epsilon = 1e-6 if convention == "verl" else 1e-4
        n = batch.lengths[i]
        advantages.append(oracles.advantages(row, values[i], others, estimator, 0.9, 0.8, epsilon)[:n])
        target = oracles.discounted_returns(row, 0.9)
        if estimator == "gae":
            lam = 0.8 if value_gae_lambda is None else value_gae_lambda
            target = [a + v for a, v in zip(oracles.gae(row, values[i], 0.9, lam), values[i], strict=True)]
        returns.append(target[:n])
        at_end.append(target[n] if slots[i] else np.nan)
    # Sums of a group that are equal but for rounding: 0 there, and rounding over epsilon here.
    np.testing.assert_allclose(found.advantages, flat(advantages), rtol=1e-7, atol=1e-7)
    assert found.returns is not None and found.bootstrap_returns is not None
    np.testing.assert_allclose(found.returns, flat(returns), **close)
    np.testing.assert_allclose(found.bootstrap_returns, np.array(at_end, np.float64), **close)
    np.testing.assert_allclose(found.rewards, flat([r[:n] for r, n in zip(rows, batch.lengths, strict=True)]), **close)


@given(batches(), estimators, conventions, groups_of, st.randoms(use_true_random=False))
def test_order_of_rows_is_irrelevant(
    batch: Batch, estimator: str, convention: str, groups: list[int], random: Any
) -> None:
    order = list(range(len(batch.scores)))
    random.shuffle(order)
    changes: dict[str, Any] = {
        "estimator": estimator,
        "conventions": convention,
        "whiten_rewards": True,
        "whiten_advantages": True,
        "score_scaling": "running_mean_std",
        "kl_controller": "adaptive",
    }
    plain, shuffled = run(batch, sorted(order), groups, **changes), run(batch, order, groups, **changes)
    bounds = offsets(batch.values)
    pairs = zip((*plain.estimates[:3], plain.weights), (*shuffled.estimates[:3], shuffled.weights), strict=True)
    for before, after in pairs:
        expected = [before[bounds[i] : bounds[i + 1]].tolist() for i in order]  # type: ignore[index]
        np.testing.assert_allclose(after, flat(expected), rtol=1e-6, atol=1e-6)  # type: ignore[arg-type]
    for name, value in plain.metrics.items():
        np.testing.assert_allclose(shuffled.metrics[name], value, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(shuffled.state.scores.m2, plain.state.scores.m2, rtol=1e-9, atol=1e-9)


@given(batches(), st.sampled_from(["none", "truncate", "mask", "reject_sequence"]))
def test_importance_weights_are_the_loop(batch: Batch, correction: Any) -> None:
    keywords: dict[str, Any] = {"correction_min": 0.5, "correction_max": 2.0}
    near = [
        [p + r / 20 for p, r in zip(*rows, strict=True)] for rows in zip(batch.logprobs, batch.rewards, strict=True)
    ]
    bounds = offsets(near)
    found, truncated, rejected = importance_weights(
        flat(batch.logprobs), flat(near), bounds, correction=correction, **keywords
    )
    rows = zip(batch.logprobs, near, strict=True)
    expected = [oracles.importance_weights(old, new, correction, 0.5, 2.0) for old, new in rows]
    np.testing.assert_allclose(found, flat(expected), rtol=1e-9)
    zeroed = sum(weight == 0 for row in expected for weight in row)
    assert int((found == 0).sum()) == zeroed
    metrics = correction_metrics(summary(found), zeroed=zeroed, truncated=truncated, rejected=rejected)
    assert 0 <= metrics["correction/ess"] <= 1 + 1e-12


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 20), st.integers(1, 20), unit)
def test_overlong_penalties_are_the_three_cases(lengths: list[int], longest: int, buffer: int, penalty: float) -> None:
    found = overlong_penalties(
        np.array(lengths, np.int64), max_new_tokens=longest, overlong_buffer=buffer, overlong_penalty=penalty
    )
    np.testing.assert_allclose(found, [oracles.overlong_penalty(n, longest, buffer, penalty) for n in lengths], **close)


@given(st.lists(columns, min_size=1, max_size=4))
def test_merged_moments_are_those_of_everything_at_once(parts: list[list[float]]) -> None:
    moments = Moments(0, 0.0, 0.0)
    for part in parts:
        moments = merged(moments, np.array(part))
    everything = np.concatenate([np.array(part) for part in parts])
    assert moments.count == everything.size
    np.testing.assert_allclose(moments.mean, everything.mean(), **close)
    np.testing.assert_allclose(moments.m2, everything.var() * everything.size, **close)


@given(batches(), st.data())
def test_moments_of_rows_are_those_of_everything_at_once_however_the_rows_are_cut(
    batch: Batch, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(batch.scores)))
    parts = [row_moments(flat(rows), offsets(rows)) for rows in (batch.values[:cut], batch.values[cut:])]
    found = EMPTY.joined(parts[0]).joined(parts[1])
    assert found == EMPTY.joined(row_moments(flat(batch.values), offsets(batch.values)))
    everything = flat(batch.values)
    assert found.count == everything.size
    np.testing.assert_allclose(found.mean, everything.mean() if everything.size else 0.0, **close)
    np.testing.assert_allclose(found.std, everything.std() if everything.size else 0.0, rtol=1e-7, atol=1e-7)


@given(batches(), st.data())
def test_slots_come_out_as_they_went_in(batch: Batch, data: st.DataObject) -> None:
    count = len(batch.scores)
    slots = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    bounds, fill = offsets(batch.values), np.array(batch.scores, np.float64)
    extended = with_slots(flat(batch.values), fill, bounds, slots)
    rows = zip(batch.values, batch.scores, slots, strict=True)
    assert extended.tolist() == [value for row, score, slot in rows for value in [*row, *([score] if slot else [])]]
    tokens, at_slots = without_slots(extended, bounds, slots)
    assert tokens.tolist() == flat(batch.values).tolist() and at_slots.tolist() == fill[slots].tolist()
    assert slotted_offsets(bounds, slots)[-1] == extended.size


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


@given(columns, st.booleans(), st.booleans(), st.booleans())
def test_whiten_is_the_loop(x: list[float], shift_mean: bool, bessel: bool, floor: bool) -> None:
    expected = oracles.whiten(x, shift_mean=shift_mean, bessel=bessel, floor=floor)
    variance, epsilon = "bessel" if bessel else "population", "floor" if floor else "added"
    found = any_whiten(np.array(x), shift_mean=shift_mean, variance=variance, epsilon=epsilon)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


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


@given(batches(), estimators, conventions)
def test_inputs_are_left_as_they_are(batch: Batch, estimator: str, convention: str) -> None:
    given_responses = responses(batch.logprobs, batch.ref_logprobs, batch.values, batch.scores, sampler=batch.rewards)
    arrays = [value for value in vars(given_responses).values() if isinstance(value, np.ndarray)]
    kept = [array.copy() for array in arrays]
    changes: dict[str, Any] = {**SHAPED, "whiten_rewards": True, "whiten_advantages": True}
    estimated(given_responses, estimator=estimator, conventions=convention, **changes)
    for before, after in zip(kept, arrays, strict=True):
        np.testing.assert_array_equal(before, after)
