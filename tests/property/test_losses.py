"""Laws of the torch half: masks mean "as if dropped", gradients vanish outside the clip, and loops agree."""

import math
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.algorithms.diagnostics import policy_diagnostics, value_diagnostics
from rlhf_core.algorithms.losses import masked_mean, masked_sum, pairwise_loss, policy_loss, value_loss
from tests.property.strategies import numbers
from tests.reference import oracles

clip_ranges = st.floats(0.05, 0.5)


class Padded(NamedTuple):
    """Three [B, T] float64 inputs of a loss, and a mask with at least one True."""

    new: Tensor
    old: Tensor
    third: Tensor
    mask: Tensor


@st.composite
def padded(draw: st.DrawFn) -> Padded:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def grid(of: st.SearchStrategy[Any], dtype: torch.dtype) -> Tensor:
        values = draw(st.lists(of, min_size=rows * width, max_size=rows * width))
        return torch.tensor(values, dtype=dtype).reshape(rows, width)

    mask = grid(st.booleans(), torch.bool)
    mask[draw(st.integers(0, rows - 1)), draw(st.integers(0, width - 1))] = True
    return Padded(*(grid(numbers(-3, 3), torch.float64) for _ in range(3)), mask)


def poisoned(x: Tensor, mask: Tensor, poison: float) -> Tensor:
    return torch.where(mask, x, torch.full_like(x, poison))


def assert_close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@given(padded(), clip_ranges)
def test_policy_loss_is_the_loop(x: Padded, clip_range: float) -> None:
    found = policy_loss(x.new, x.old, x.third, clip_range=clip_range).flatten().tolist()
    tokens = zip(x.new.flatten().tolist(), x.old.flatten().tolist(), x.third.flatten().tolist(), strict=True)
    assert_close(torch.tensor(found, dtype=torch.float64), [oracles.policy_loss(*t, clip_range) for t in tokens])


@given(padded(), clip_ranges)
def test_value_loss_is_the_loop(x: Padded, clip_range: float) -> None:
    found = value_loss(x.new, x.old, x.third, value_clip_range=clip_range).flatten().tolist()
    tokens = zip(x.new.flatten().tolist(), x.old.flatten().tolist(), x.third.flatten().tolist(), strict=True)
    assert_close(torch.tensor(found, dtype=torch.float64), [oracles.value_loss(*t, clip_range) for t in tokens])


@given(padded(), clip_ranges)
def test_at_ratio_one_the_loss_is_minus_the_mean_advantage(x: Padded, clip_range: float) -> None:
    loss = masked_mean(policy_loss(x.old, x.old, x.third, x.mask, clip_range=clip_range), x.mask)
    assert_close(loss, -x.third[x.mask].mean())
    sums = policy_diagnostics(x.old, x.old, x.third, x.mask, clip_range=clip_range)
    assert sums["clipfrac"] == 0 and sums["approxkl"] == 0 and sums["approxkl_k3"] == 0
    assert sums["ratio"] == sums["tokens"] == x.mask.sum()


@given(padded(), clip_ranges)
def test_gradient_is_zero_outside_the_clip_and_minus_a_ratio_inside(x: Padded, clip_range: float) -> None:
    new = x.new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(policy_loss(new, x.old, x.third, clip_range=clip_range).sum(), new)
    ratio = torch.exp(x.new - x.old)
    outside = ((x.third > 0) & (ratio > 1 + clip_range)) | ((x.third < 0) & (ratio < 1 - clip_range))
    assert (gradient[outside] == 0).all()
    assert_close(gradient[~outside], (-x.third * ratio)[~outside])
    sums = policy_diagnostics(x.new, x.old, x.third, torch.ones_like(x.mask), clip_range=clip_range)
    assert sums["clipfrac"] == outside.sum()


@given(padded(), clip_ranges, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_masked_is_filtered(x: Padded, clip_range: float, poison: float) -> None:
    for loss, name in [(policy_loss, "clip_range"), (value_loss, "value_clip_range")]:
        dirty = [poisoned(t, x.mask, poison) for t in x[:3]]
        dirty[0].requires_grad_()
        total = masked_sum(loss(*dirty, x.mask, **{name: clip_range}), x.mask)
        (gradient,) = torch.autograd.grad(total, dirty[0])

        kept = [t[x.mask] for t in x[:3]]
        kept[0].requires_grad_()
        expected = loss(*kept, **{name: clip_range}).sum()
        (expected_gradient,) = torch.autograd.grad(expected, kept[0])
        assert_close(total, expected)
        assert_close(gradient[x.mask], expected_gradient)
        assert (gradient[~x.mask] == 0).all()


@given(padded(), st.integers(1, 3))
def test_padding_adds_nothing(x: Padded, extra: int) -> None:
    def widen(t: Tensor, fill: float) -> Tensor:
        return torch.cat([t, torch.full((t.shape[0], extra), fill, dtype=t.dtype)], dim=1)

    mask = widen(x.mask, False)
    wide = [widen(t, math.nan) for t in x[:3]]
    for loss, name in [(policy_loss, "clip_range"), (value_loss, "value_clip_range")]:
        narrow_mean = masked_mean(loss(*x, **{name: 0.2}), x.mask)
        assert_close(masked_mean(loss(*wide, mask, **{name: 0.2}), mask), narrow_mean)
    assert policy_diagnostics(*wide, mask, clip_range=0.2).keys() >= {"tokens"}
    for diagnostics, name in [(policy_diagnostics, "clip_range"), (value_diagnostics, "value_clip_range")]:
        before, after = diagnostics(*x, **{name: 0.2}), diagnostics(*wide, mask, **{name: 0.2})
        for key, value in before.items():
            assert_close(after[key], value)


@given(padded(), st.data())
def test_micro_batches_sum_to_the_batch(x: Padded, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, x.mask.shape[0]))
    whole = masked_sum(policy_loss(*x, clip_range=0.2), x.mask)
    parts = [[t[rows] for t in x] for rows in (slice(0, cut), slice(cut, None))]
    assert_close(sum(masked_sum(policy_loss(*part, clip_range=0.2), part[3]) for part in parts), whole)  # type: ignore[arg-type]


@given(st.lists(st.tuples(numbers(-30, 30), numbers(-30, 30)), min_size=1, max_size=10))
def test_pairwise_loss_is_minus_the_log_of_the_win_probability(pairs: list[tuple[float, float]]) -> None:
    chosen, rejected = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    expected = [math.log1p(math.exp(r - c)) for c, r in pairs]
    assert_close(pairwise_loss(chosen, rejected), expected)


@given(padded())
def test_inputs_are_left_as_they_are(x: Padded) -> None:
    kept = [t.clone() for t in x]
    policy_loss(*x, clip_range=0.2)
    value_loss(*x, value_clip_range=0.2)
    policy_diagnostics(*x, clip_range=0.2)
    value_diagnostics(*x, value_clip_range=0.2)
    assert all(torch.equal(before, after) for before, after in zip(kept, x, strict=True))


def test_gradients_agree_with_finite_differences() -> None:
    torch.manual_seed(0)
    new, old, third = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(3, 4) > 0.3
    new.requires_grad_()
    assert torch.autograd.gradcheck(lambda n: policy_loss(n, old, third, mask, clip_range=0.2), (new,))
    assert torch.autograd.gradcheck(lambda n: value_loss(n, old, third, mask, value_clip_range=0.3), (new,))
