"""Losses: golden cells, clipping, masks, extremes. Numbers: float64 hand sums.

Mutations that must fail here: min for max; clip before multiplying by A; ratio inverted; sign of the loss; 0.5 dropped;
value clipped around the new value; mask dropped, or applied after the arithmetic; log(sigmoid) written out; bound
removed.
"""

import inspect
import math

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.losses import masked_mean, masked_sum, pairwise_loss, policy_loss, value_loss
from rlhf_core.errors import NumericError, RowMismatch

RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5]


def tensor(values: object, *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def close(found: Tensor, expected: object) -> None:
    torch.testing.assert_close(found.detach().double(), tensor(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "losses", "slopes"),
    [
        (2.0, [-1.0, -1.8, -2.0, -2.2, -2.4], [-2.0, -2.0, -2.0, -2.0, 0.0]),
        (-2.0, [1.6, 1.8, 2.0, 2.2, 3.0], [0.0, 2.0, 2.0, 2.0, 2.0]),
        (0.0, [0.0] * 5, [0.0] * 5),
    ],
)
def test_policy_loss_and_its_slope_at_five_ratios(advantage: float, losses: list[float], slopes: list[float]) -> None:
    ratio = tensor([RATIOS], grad=True)
    loss = policy_loss(ratio.log(), tensor([[0.0] * 5]), tensor([[advantage] * 5]), clip_range=0.2)
    close(loss, [losses])
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    close(slope, [slopes])
    assert not slope[0][[s == 0 for s in slopes]].any()  # exactly 0, not almost


def test_ratio_is_new_over_old() -> None:
    close(policy_loss(tensor([[-1.0]]), tensor([[-1.1]]), tensor([[1.0]]), clip_range=0.2), [[-math.exp(0.1)]])


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_policy_loss_and_gradient_stay_finite_at_huge_log_ratios(log_ratio: float, advantage: float) -> None:
    new = torch.tensor([[log_ratio, 0.1]], requires_grad=True)
    loss = policy_loss(new, torch.zeros(1, 2), torch.full((1, 2), advantage), clip_range=0.2)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad is not None and new.grad.isfinite().all() and new.grad[0, 0] == 0


def test_the_bound_is_at_twenty_nats() -> None:
    loss = policy_loss(tensor([[19.0, 21.0]]), tensor([[0.0, 0.0]]), tensor([[-1.0, -1.0]]), clip_range=0.2)
    close(loss, [[math.exp(19), math.exp(20)]])


def test_value_loss() -> None:
    # Range 0.3 around V = 1. New 1.2: both branches 0.5 (1.2 - R)^2. New 2: clipped to 1.3.
    # R = 2, new 2: max(0, 0.49) / 2 = 0.245, gradient 0. R = 0, new 2: max(4, 1.69) / 2 = 2, gradient 2.
    # R = 2, new 0: clipped to 0.7; max(4, 1.69) / 2 = 2, gradient -2.
    new = tensor([[1.2, 2.0, 2.0, 0.0]], grad=True)
    returns = tensor([[2.0, 2.0, 0.0, 2.0]])
    loss = value_loss(new, torch.ones_like(returns), returns, value_clip_range=0.3)
    close(loss, [[0.32, 0.245, 2.0, 2.0]])
    (slope,) = torch.autograd.grad(loss.sum(), new)
    close(slope, [[-0.8, 0.0, 2.0, -2.0]])


POISON = [math.nan, math.inf, -math.inf, 1e30]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("loss_name", ["policy", "value"])
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_masked_positions_reach_neither_loss_nor_gradient(loss_name: str, argument: int, poison: float) -> None:
    inputs = [torch.tensor([[-0.3, -0.2, -0.1]]) * (i + 1) for i in range(3)]
    mask = torch.tensor([[True, False, True]])

    def run(poisoned: bool) -> tuple[Tensor, Tensor]:
        values = [value.clone() for value in inputs]
        if poisoned:
            values[argument][0, 1] = poison
        values[0].requires_grad_()
        if loss_name == "policy":
            per_token = policy_loss(*values, mask, clip_range=0.2)
        else:
            per_token = value_loss(*values, mask, value_clip_range=0.3)
        assert per_token[0, 1] == 0
        total = masked_mean(per_token, mask)
        (gradient,) = torch.autograd.grad(total, values[0])
        return total.detach(), gradient

    clean, dirty = run(False), run(True)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    assert dirty[1][0, 1] == 0 and dirty[1][0, 0] != 0


@pytest.mark.parametrize("poison", POISON)
def test_masked_sum_and_mean_ignore_masked_positions(poison: float) -> None:
    x = tensor([[1.0, poison], [3.0, 5.0]], grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    close(masked_sum(x, mask), 9.0)
    close(masked_mean(x, mask), 3.0)
    (gradient,) = torch.autograd.grad(masked_mean(x, mask), x)
    close(gradient, [[1 / 3, 0], [1 / 3, 1 / 3]])


def test_a_bad_number_at_a_real_token_is_not_hidden() -> None:
    mask = torch.tensor([[True, True]])
    loss = policy_loss(tensor([[math.nan, 0.0]]), tensor([[0.0, 0.0]]), tensor([[1.0, 1.0]]), mask, clip_range=0.2)
    assert masked_mean(loss, mask).isnan()


def test_mean_over_no_tokens_is_an_error_and_their_sum_is_zero() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert masked_sum(torch.full((2, 3), math.nan), nothing) == 0
    with pytest.raises(NumericError, match=r"at least one real token, found none in a mask of shape \[2, 3\]"):
        masked_mean(torch.ones(2, 3), nothing)


PER_TOKEN = [[1.0], [3.0, 5.0, 4.0]]  # two responses of one and three tokens


def padded(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    return tensor([row + [math.nan] * (width - len(row)) for row in rows]), mask


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_token_mean_does_not_depend_on_the_split(split: list[list[int]]) -> None:
    # 13 / 4; a mean of the two micro-batch means would be (1 + 4) / 2 = 2.5.
    total = sum(masked_sum(*padded([PER_TOKEN[i] for i in part])).item() / 4 for part in split)
    assert total == pytest.approx(3.25, rel=1e-12)


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]]])
def test_mean_over_responses_of_token_means_is_another_number(split: list[list[int]]) -> None:
    means = [masked_mean(*padded([PER_TOKEN[i]])).item() for part in split for i in part]
    assert sum(means) / len(means) == pytest.approx(2.5, rel=1e-12)


def test_weights_after_a_step_do_not_depend_on_the_split() -> None:
    torch.manual_seed(0)
    features, mask = torch.randn(2, 3, 4), torch.tensor([[True, False, False], [True, True, True]])
    old, advantages = torch.randn(2, 3) * 0.1, torch.randn(2, 3)
    start = torch.randn(4) * 0.1

    def step(parts: list[slice]) -> Tensor:
        weights = start.clone().requires_grad_()
        for part in parts:
            loss = policy_loss(features[part] @ weights, old[part], advantages[part], mask[part], clip_range=0.2)
            (masked_sum(loss, mask[part]) / mask.sum()).backward()
        assert weights.grad is not None
        return (weights - 0.1 * weights.grad).detach()

    torch.testing.assert_close(step([slice(0, 2)]), step([slice(0, 1), slice(1, 2)]), rtol=1e-6, atol=1e-7)


def test_pairwise_loss() -> None:
    loss = pairwise_loss(tensor([1.2, 0.5, 0.3, 2.0]), tensor([0.2, 0.5, 0.9, 2.0]))
    expected = tensor([0.313262, 0.693147, 1.037488, 0.693147])
    torch.testing.assert_close(loss, expected, rtol=0, atol=5e-7)
    assert loss.mean().item() == pytest.approx(0.684261, abs=5e-7)


@pytest.mark.parametrize("margin", [-100.0, -800.0, 800.0])
def test_pairwise_loss_stays_finite_at_large_margins(margin: float) -> None:
    chosen = torch.tensor([margin], requires_grad=True)
    loss = pairwise_loss(chosen, torch.zeros(1))
    loss.sum().backward()
    assert loss.item() == pytest.approx(max(-margin, 0.0), rel=1e-6)
    assert chosen.grad is not None and chosen.grad.item() == (-1.0 if margin < 0 else 0.0)


def test_a_pair_of_equal_responses_has_loss_ln_2() -> None:
    assert pairwise_loss(tensor([0.7]), tensor([0.7])).item() == pytest.approx(math.log(2), rel=1e-12)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(RowMismatch, match=r"\[2, 3\], \[2, 3, 1\], \[2, 3\]"):
        inspect.unwrap(value_loss)(torch.ones(2, 3), torch.ones(2, 3, 1), torch.ones(2, 3), value_clip_range=0.3)
    with pytest.raises(RowMismatch, match=r"\[2, 3\], \[2, 1\]"):
        inspect.unwrap(masked_sum)(torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(RowMismatch, match=r"\[2\], \[1\]"):
        inspect.unwrap(pairwise_loss)(torch.ones(2), torch.ones(1))
