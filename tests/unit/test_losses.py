"""Losses: golden cells, clipping, extremes. Numbers: float64 hand sums.

Mutations that must fail here: min for max; clip before multiplying by A; ratio inverted; sign of the loss; 0.5 dropped;
value clipped around the new value; log(sigmoid) written out; bound removed; one range for both sides; dual clip for
A > 0; weights dropped, or inside the maximum; a sum for the mean of a sequence's log-ratios; the mean's own gradient.
"""

import inspect
import math

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.losses import (
    centring_loss,
    kl_loss,
    listwise_loss,
    pairwise_loss,
    policy_loss,
    sequence_log_ratios,
    value_loss,
)
from rlhf_core.errors import RowMismatch

RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5]


def tensor(values: object, *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def close(found: Tensor, expected: object) -> None:
    torch.testing.assert_close(found.detach().double(), tensor(expected), rtol=1e-9, atol=1e-12)


def loss_of(
    log_ratios: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> Tensor:
    return policy_loss(
        log_ratios,
        advantages,
        torch.ones_like(advantages) if weights is None else weights,
        clip_range=low,
        clip_range_high=high,
        dual_clip=dual,
    )


# --- policy loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "losses", "slopes"),
    [
        (2.0, [-1.0, -1.8, -2.0, -2.2, -2.4], [-2.0, -2.0, -2.0, -2.0, 0.0]),
        (-2.0, [1.6, 1.8, 2.0, 2.2, 3.0], [0.0, 2.0, 2.0, 2.0, 2.0]),
        (0.0, [0.0] * 5, [0.0] * 5),
    ],
)
def test_policy_loss_and_its_slope_at_five_ratios(advantage: float, losses: list[float], slopes: list[float]) -> None:
    ratio = tensor(RATIOS, grad=True)
    loss = loss_of(ratio.log(), tensor([advantage] * 5))
    close(loss, losses)
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    close(slope, slopes)
    assert not slope[[s == 0 for s in slopes]].any()  # exactly 0, not almost


def test_each_side_of_the_clip_has_its_own_range() -> None:
    # Range [0.8, 1.4]. A = 2: 1.3 is inside, -2.6; 1.5 is cut at 1.4, -2.8. A = -2: 0.7 is cut at 0.8, 1.6.
    ratio = tensor([1.3, 1.5, 0.7], grad=True)
    loss = loss_of(ratio.log(), tensor([2.0, 2.0, -2.0]), low=0.2, high=0.4)
    close(loss, [-2.6, -2.8, 1.6])
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    close(slope, [-2.0, 0.0, 0.0])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    # c = 3. A = -1: r = 5 -> min(5, 3) = 3 without gradient; r = 2 -> 2; r = 0.5 -> clipped at 0.8 as before.
    # A = 1: r = 5 -> -1.2, as before.
    ratio = tensor([5.0, 2.0, 0.5, 5.0], grad=True)
    advantages = tensor([-1.0, -1.0, -1.0, 1.0])
    loss = loss_of(ratio.log(), advantages, dual=3.0)
    close(loss, [3.0, 2.0, 0.8, -1.2])
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    close(slope, [0.0, 1.0, 0.0, 0.0])
    close(loss_of(ratio.log(), advantages), [5.0, 2.0, 0.8, -1.2])


def test_importance_weights_multiply_the_loss_and_carry_no_gradient() -> None:
    # Trainer [-1, -0.2, -3, -0.5] over sampler [-1.1, -1.5, -2, -0.5]: exp of the differences is
    # [1.105171, 3.669297, 0.367879, 1], the second truncated at 2. At ratio 1 and A = 1 the mean loss is -4.473050 / 4.
    weights = tensor([math.exp(0.1), 2.0, math.exp(-1.0), 1.0], grad=True)
    new = tensor([-1.0, -0.2, -3.0, -0.5], grad=True)
    loss = loss_of(new - new.detach(), torch.ones(4, dtype=torch.float64), weights.detach()).mean()
    assert loss.item() == pytest.approx(-1.118263, abs=5e-7)
    (slope,) = torch.autograd.grad(loss, new)
    close(slope, (-weights.detach() / 4).tolist())


def test_a_weight_of_zero_leaves_no_loss_and_no_gradient() -> None:
    ratio = tensor([0.9, 1.1], grad=True)
    loss = loss_of(ratio.log(), tensor([1.0, -1.0]), tensor([0.0, 0.0]))
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    assert not loss.any() and not slope.any()


def test_the_weight_multiplies_the_clipped_loss_too() -> None:
    close(loss_of(tensor([1.5]).log(), tensor([2.0]), tensor([0.5])), [-1.2])  # 0.5 * -2.4


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_policy_loss_and_gradient_stay_finite_at_huge_log_ratios(log_ratio: float, advantage: float) -> None:
    log_ratios = torch.tensor([log_ratio, 0.1], requires_grad=True)
    loss = loss_of(log_ratios, torch.full((2,), advantage))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_ratios.grad is not None and log_ratios.grad.isfinite().all() and log_ratios.grad[0] == 0


def test_the_bound_is_at_twenty_nats() -> None:
    close(loss_of(tensor([19.0, 21.0]), tensor([-1.0, -1.0])), [math.exp(19), math.exp(20)])


def test_a_bad_number_is_not_hidden() -> None:
    assert loss_of(tensor([math.nan, 0.0]), tensor([1.0, 1.0])).mean().isnan()


# --- sequence ratio -----------------------------------------------------------------------------------------------


def test_a_sequence_has_one_ratio_and_each_token_its_own_gradient() -> None:
    # Row 1, two tokens: differences 0.1 and 0.3, mean 0.2. Row 2, one token: -0.5.
    old = tensor([-1.0, -2.0, -3.0])
    new = tensor([-0.9, -1.7, -3.5], grad=True)
    log_ratios = sequence_log_ratios(new, old, [2, 1])
    close(log_ratios, [0.2, 0.2, -0.5])
    # With sequence means, weights 1/4, 1/4, 1/2; clip 0.2; A = 1 and 2 for the first row's tokens, -1 for the
    # second's: row 1's ratio e^0.2 = 1.2214 is cut at 1.2, so no gradient; row 2's e^-0.5 = 0.6065 is cut at 0.8.
    weights = tensor([0.25, 0.25, 0.5])
    loss = (weights * loss_of(log_ratios, tensor([1.0, 2.0, -1.0]))).sum()
    assert loss.item() == pytest.approx(-0.25 * 1.2 - 0.25 * 2.4 + 0.5 * 0.8, rel=1e-12)
    (slope,) = torch.autograd.grad(loss, new, retain_graph=True)
    assert not slope.any()
    # Unclipped (range 0.5): d loss_t / d new_t = -weight_t * A_t * ratio of the row; none reaches another.
    loss = (weights * loss_of(log_ratios, tensor([1.0, 2.0, -1.0]), low=0.5, high=0.5)).sum()
    (slope,) = torch.autograd.grad(loss, new)
    close(slope, [-0.25 * math.exp(0.2), -0.5 * math.exp(0.2), 0.5 * math.exp(-0.5)])


def test_with_equal_advantages_the_gradient_is_that_of_the_sequence_ratio() -> None:
    # The plain form, without stop-gradient: row loss -A exp(mean(new - old)); d / d new_t = -A ratio / T.
    old, new = tensor([-1.0, -2.0, -3.0]), tensor([-0.9, -1.7, -3.05], grad=True)
    loss = loss_of(sequence_log_ratios(new, old, [3]), tensor([2.0, 2.0, 2.0]), low=0.9, high=0.9).mean()
    (slope,) = torch.autograd.grad(loss, new)
    mean = (0.1 + 0.3 - 0.05) / 3
    close(slope, [-2 * math.exp(mean) / 3] * 3)


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RowMismatch, match="lengths sum to 4, expected 3"):
        sequence_log_ratios(tensor([0.0] * 3), tensor([0.0] * 3), [2, 2])


# --- KL loss ------------------------------------------------------------------------------------------------------

# Gradient of k3: 1 - e^-d, 0 beyond the bound at d = -20.
KL = {
    "k1": ([0.0, 0.5, -0.5, 20.0, 100.0, -100.0], [1.0] * 6),
    "k2": ([0.0, 0.125, 0.125, 200.0, 5000.0, 5000.0], [0.0, 0.5, -0.5, 20.0, 100.0, -100.0]),
    "absolute": ([0.0, 0.5, 0.5, 20.0, 100.0, 100.0], [0.0, 1.0, -1.0, 1.0, 1.0, -1.0]),
    "k3": (
        [0.0, math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 19.0 + math.exp(-20), 99.0, math.exp(20) - 21],
        [0.0, 1 - math.exp(-0.5), 1 - math.exp(0.5), 1 - math.exp(-20), 1.0, 0.0],
    ),
}


@pytest.mark.parametrize("estimator", KL)
def test_kl_loss_and_its_gradient(estimator: str) -> None:
    reference = tensor([-1.5] * 6)
    new = (reference + tensor([0.0, 0.5, -0.5, 20.0, 100.0, -100.0])).requires_grad_()
    loss = kl_loss(new, reference, estimator=estimator, estimate_bound=None)  # type: ignore[arg-type]
    close(loss, KL[estimator][0])
    (slope,) = torch.autograd.grad(loss.sum(), new)
    close(slope, KL[estimator][1])


def test_k3_at_a_difference_of_minus_twenty_still_has_its_gradient() -> None:
    new = tensor([-20.0], grad=True)
    loss = kl_loss(new, tensor([0.0]), estimator="k3", estimate_bound=None)
    close(loss, [math.exp(20) - 21])
    (slope,) = torch.autograd.grad(loss.sum(), new)
    close(slope, [1 - math.exp(20)])


def test_an_estimate_may_be_bounded_and_has_no_gradient_beyond() -> None:
    # verl and OpenRLHF: to 10 nats. k3 at d = -3 is e^3 - 4 = 16.09, at d = 100 it is 99, at d = 1 it is e^-1.
    new = tensor([-3.0, 100.0, 1.0], grad=True)
    loss = kl_loss(new, torch.zeros_like(new), estimator="k3", estimate_bound=10.0)
    close(loss, [10.0, 10.0, math.exp(-1)])
    (slope,) = torch.autograd.grad(loss.sum(), new)
    close(slope, [0.0, 0.0, 1 - math.exp(-1)])
    close(kl_loss(tensor([-30.0]), tensor([0.0]), estimator="k1", estimate_bound=10.0), [-10.0])


def test_k3_keeps_its_digits_where_the_policies_are_close() -> None:
    # d^2/2 - d^3/6 at d = 1e-3 in float32; exp(-d) - 1 + d would be off by percents.
    found = kl_loss(torch.tensor([1e-3]), torch.tensor([0.0]), estimator="k3", estimate_bound=None)
    assert found.item() == pytest.approx(5e-7 - 1e-9 / 6, rel=1e-3)


# --- value loss ---------------------------------------------------------------------------------------------------


def test_value_loss() -> None:
    # Range 0.3 around V = 1. New 1.2: both branches 0.5 (1.2 - R)^2. New 2: clipped to 1.3.
    # R = 2, new 2: max(0, 0.49) / 2 = 0.245, gradient 0. R = 0, new 2: max(4, 1.69) / 2 = 2, gradient 2.
    # New 0: clipped to 0.7. R = 2: max(4, 1.69) / 2 = 2, gradient -2. R = 0: max(0, 0.49) / 2 = 0.245, gradient 0.
    new = tensor([1.2, 2.0, 2.0, 0.0, 0.0], grad=True)
    returns = tensor([2.0, 2.0, 0.0, 2.0, 0.0])
    loss = value_loss(new, torch.ones_like(returns), returns, value_clip_range=0.3, factor=0.5)
    close(loss, [0.32, 0.245, 2.0, 2.0, 0.245])
    (slope,) = torch.autograd.grad(loss.sum(), new)
    close(slope, [-0.8, 0.0, 2.0, -2.0, 0.0])


def test_unclipped_value_loss_is_the_squared_error_times_the_factor() -> None:
    new = tensor([1.2, 2.0, 0.0], grad=True)
    returns = tensor([2.0, 2.0, 2.0])
    loss = value_loss(new, torch.ones_like(returns), returns, value_clip_range=None, factor=0.25)
    close(loss, [0.16, 0.0, 1.0])  # 0.64 / 4, 0, 4 / 4
    (slope,) = torch.autograd.grad(loss.sum(), new)
    close(slope, [-0.4, 0.0, -1.0])


# --- pairwise loss ------------------------------------------------------------------------------------------------


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


def test_margins_are_subtracted_inside_the_sigmoid_and_targets_mix_both_directions() -> None:
    # z = 1 - 0 - 1 = 0: ln 2 at any target. z = ln 3: ln 4/3 and ln 4; target 0.75: 0.75 ln 4/3 + 0.25 ln 4.
    loss = pairwise_loss(
        tensor([1.0, math.log(3)]), tensor([0.0, 0.0]), margins=tensor([1.0, 0.0]), targets=tensor([0.9, 0.75])
    )
    close(loss, [math.log(2), 0.75 * math.log(4 / 3) + 0.25 * math.log(4)])


@pytest.mark.parametrize("target, slope", [(0.0, 1.0), (0.5, 0.5), (0.9, 0.1)])
def test_smoothed_losses_stay_finite_at_large_margins(target: float, slope: float) -> None:
    # z = 800: -(1 - target) log sigmoid(-800) = 800 (1 - target), with slope 1 - target.
    chosen = torch.tensor([800.0], requires_grad=True)
    loss = pairwise_loss(chosen, torch.zeros(1), targets=torch.tensor([target]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(800 * slope, rel=1e-6)
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(slope, rel=1e-6)


# --- listwise loss ------------------------------------------------------------------------------------------------


def test_a_list_of_two_has_the_pairwise_loss_whatever_its_order() -> None:
    scores = tensor([1.2, 0.2, 0.9, 0.3])
    expected = pairwise_loss(tensor([1.2, 0.3]), tensor([0.2, 0.9]))
    close(listwise_loss(scores, [[0, 1], [1, 0]]), expected.tolist())


def test_listwise_loss_of_three_by_hand() -> None:
    # exp(s) = 4, 3, 1, best first: -log (4/8) - log (3/4) - log (1/1) = ln 2 + ln 4/3.
    scores = tensor([math.log(3), math.log(4), 0.0], grad=True)
    loss = listwise_loss(scores, [[1, 0, 2]])
    close(loss, [math.log(2) + math.log(4 / 3)])
    (slope,) = torch.autograd.grad(loss.sum(), scores)
    close(slope, [3 / 8 + 3 / 4 - 1, 4 / 8 - 1, 1 / 8 + 1 / 4])


def test_tied_responses_are_compared_with_worse_ones_only() -> None:
    # exp(s) = 4, 3, 1, the first two tied: -log (4/5) - log (3/4). All tied: 0, without gradient.
    scores = tensor([math.log(4), math.log(3), 0.0, 5.0, 7.0], grad=True)
    loss = listwise_loss(scores, [[0, 0, 1], [0, 0]])
    close(loss, [math.log(5 / 4) + math.log(4 / 3), 0.0])
    (slope,) = torch.autograd.grad(loss.sum(), scores)
    close(slope, [4 / 5 - 1, 3 / 4 - 1, 1 / 5 + 1 / 4, 0.0, 0.0])


@pytest.mark.parametrize("margin", [-100.0, -800.0])
def test_listwise_loss_stays_finite_at_large_margins(margin: float) -> None:
    scores = torch.tensor([margin, 0.0], requires_grad=True)
    loss = listwise_loss(scores, [[0, 1]])
    loss.sum().backward()
    assert loss.item() == -margin
    assert scores.grad is not None and scores.grad.tolist() == [-1.0, 1.0]


def test_centring_loss() -> None:
    # Pairs: (c + r)^2 = 9 and 0. A list of three with mean 1: (2 * 1)^2.
    close(centring_loss(tensor([2.0, 1.0, 3.0, -3.0, 0.0, 1.0, 2.0]), [2, 2, 3]), [9.0, 0.0, 4.0])


def test_lists_that_do_not_fit_the_scores_are_refused() -> None:
    with pytest.raises(RowMismatch, match="ranks are 3 in all, expected 2"):
        listwise_loss(torch.ones(2), [[0, 1], [0]])
    with pytest.raises(RowMismatch, match="lengths sum to 3, expected 2"):
        centring_loss(torch.ones(2), [3])


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(RowMismatch, match=r"\[3\], \[1\], \[3\]"):
        inspect.unwrap(policy_loss)(
            torch.ones(3), torch.ones(1), torch.ones(3), clip_range=0.2, clip_range_high=0.2, dual_clip=None
        )
    with pytest.raises(RowMismatch, match=r"\[2, 3\], \[2, 3, 1\], \[2, 3\]"):
        inspect.unwrap(value_loss)(
            torch.ones(2, 3), torch.ones(2, 3, 1), torch.ones(2, 3), value_clip_range=0.3, factor=0.5
        )
    with pytest.raises(RowMismatch, match=r"\[2\], \[1\]"):
        inspect.unwrap(kl_loss)(torch.ones(2), torch.ones(1), estimator="k1", estimate_bound=None)
    with pytest.raises(RowMismatch, match=r"\[2\], \[1\]"):
        inspect.unwrap(pairwise_loss)(torch.ones(2), torch.ones(1))
