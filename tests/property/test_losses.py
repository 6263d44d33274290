"""Laws of the torch half: loops agree, gradients vanish outside the clip, and parts add up to the whole."""

import math
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.algorithms.aggregation import token_weights
from rlhf_core.algorithms.diagnostics import policy_diagnostics, value_diagnostics
from rlhf_core.algorithms.losses import kl_loss, pairwise_loss, policy_loss, sequence_log_ratios, value_loss
from tests.property.strategies import numbers
from tests.reference import oracles


class Rows(NamedTuple):
    """Responses of one or more tokens: four numbers a token, flat, float64."""

    lengths: list[int]
    new: Tensor
    old: Tensor
    third: Tensor
    weights: Tensor

    def split(self, x: Tensor) -> list[list[float]]:
        """The rows of a flat tensor, as lists."""
        return [row.tolist() for row in x.split(self.lengths)]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    total = sum(lengths)

    def flat(of: st.SearchStrategy[float]) -> Tensor:
        return torch.tensor(draw(st.lists(of, min_size=total, max_size=total)), dtype=torch.float64)

    return Rows(lengths, *(flat(numbers(-3, 3)) for _ in range(3)), flat(numbers(0, 2)))


class Clip(NamedTuple):
    low: float
    high: float
    dual: float | None

    @property
    def named(self) -> dict[str, Any]:
        return {"clip_range": self.low, "clip_range_high": self.high, "dual_clip": self.dual}


clips = st.builds(Clip, st.floats(0.05, 0.5), st.floats(0.05, 0.8), st.none() | st.floats(1.9, 5))
value_clips = st.none() | st.floats(0.05, 0.5)


def assert_close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def tokens(*tensors: Tensor) -> Any:
    return zip(*(tensor.tolist() for tensor in tensors), strict=True)


@given(rows(), clips)
def test_policy_loss_is_the_loop(x: Rows, clip: Clip) -> None:
    log_ratios = x.new - x.old
    found = policy_loss(log_ratios, x.third, x.weights, **clip.named)
    assert_close(
        found, [oracles.policy_loss(d, a, *clip, weight=w) for d, a, w in tokens(log_ratios, x.third, x.weights)]
    )


@given(rows(), clips)
def test_gradient_is_zero_outside_the_clip_and_minus_a_ratio_inside(x: Rows, clip: Clip) -> None:
    log_ratios = (x.new - x.old).requires_grad_()
    loss = policy_loss(log_ratios, x.third, torch.ones_like(x.third), **clip.named)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratios)
    slopes = [oracles.policy_slope(d, a, *clip) for d, a in tokens(log_ratios.detach(), x.third)]
    assert_close(gradient, slopes)
    assert not gradient[[slope == 0 for slope in slopes]].any()
    sums = policy_diagnostics(log_ratios.detach(), x.third, **clip.named)
    flat = [slope == 0 and advantage != 0 for slope, advantage in zip(slopes, x.third.tolist(), strict=True)]
    assert sums["clipfrac"] + sums["dual_clipfrac"] == sum(flat)
    assert sums["clipfrac"] == sums["clipfrac_low"] + sums["clipfrac_high"]


@given(rows(), clips)
def test_at_ratio_one_the_loss_is_minus_the_advantage(x: Rows, clip: Clip) -> None:
    zero = torch.zeros_like(x.third)
    assert_close(policy_loss(zero, x.third, torch.ones_like(zero), **clip.named), -x.third)
    sums = policy_diagnostics(zero, x.third, **clip.named)
    assert sums["clipfrac"] == sums["approxkl"] == sums["approxkl_k3"] == 0
    assert sums["ratio"] == len(zero)


@given(rows())
def test_sequence_ratios_are_geometric_means(x: Rows) -> None:
    found = sequence_log_ratios(x.new, x.old, x.lengths)
    expected = [
        value
        for new, old in zip(x.split(x.new), x.split(x.old), strict=True)
        for value in [oracles.sequence_log_ratio(new, old)] * len(new)
    ]
    assert_close(found, expected)


@given(rows(), clips)
def test_a_sequence_s_gradient_is_each_token_s_own(x: Rows, clip: Clip) -> None:
    new = x.new.clone().requires_grad_()
    log_ratios = sequence_log_ratios(new, x.old, x.lengths)
    loss = policy_loss(log_ratios, x.third, torch.ones_like(x.third), **clip.named)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert_close(gradient, [oracles.policy_slope(d, a, *clip) for d, a in tokens(log_ratios.detach(), x.third)])


@given(rows(), st.sampled_from(["k1", "k2", "k3", "absolute"]), st.sampled_from([1.0, 7.0, 30.0]))
def test_kl_loss_and_its_gradient_are_the_loop(x: Rows, estimator: Any, scale: float) -> None:
    new = (scale * x.new).requires_grad_()
    reference = scale * x.old
    loss = kl_loss(new, reference, estimator=estimator, estimate_bound=None)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert_close(loss.detach(), [oracles.kl(n, r, estimator) for n, r in tokens(new.detach(), reference)])
    assert_close(gradient, [oracles.kl_slope(n, r, estimator) for n, r in tokens(new.detach(), reference)])


@given(rows(), value_clips)
def test_value_loss_is_the_loop(x: Rows, clip: float | None) -> None:
    found = value_loss(x.new, x.old, x.third, value_clip_range=clip, factor=0.5)
    assert_close(found, [oracles.value_loss(*state, clip) for state in tokens(x.new, x.old, x.third)])


@given(rows(), st.sampled_from(["token_mean", "sequence_mean", "constant"]), st.data())
def test_weighted_sums_of_the_parts_are_the_aggregate(x: Rows, aggregation: Any, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(x.lengths)))
    whole = {"tokens": sum(x.lengths), "responses": len(x.lengths), "constant": 7.0}
    total = torch.zeros((), dtype=torch.float64)
    losses = x.new.split(x.lengths)
    for part in (slice(0, cut), slice(cut, None)):
        weights = token_weights(x.lengths[part], aggregation=aggregation, **whole)  # type: ignore[arg-type]
        total += (weights * torch.cat([*losses[part], x.new[:0]])).sum()
    assert_close(total, oracles.aggregated(x.split(x.new), aggregation, 7.0))


@given(rows(), clips, st.data())
def test_filtered_is_as_if_never_there(x: Rows, clip: Clip, data: st.DataObject) -> None:
    # There is no mask: a response that is left out changes no token of the others, with either ratio.
    kept = data.draw(st.lists(st.booleans(), min_size=len(x.lengths), max_size=len(x.lengths)))
    places = torch.cat([torch.full((n,), keep) for n, keep in zip(x.lengths, kept, strict=True)])
    lengths = [n for n, keep in zip(x.lengths, kept, strict=True) if keep]
    for whole, part in [
        (x.new - x.old, (x.new - x.old)[places]),
        (sequence_log_ratios(x.new, x.old, x.lengths), sequence_log_ratios(x.new[places], x.old[places], lengths)),
    ]:
        among = policy_loss(whole, x.third, x.weights, **clip.named)[places]
        assert_close(among, policy_loss(part, x.third[places], x.weights[places], **clip.named))


@given(st.lists(st.tuples(numbers(-30, 30), numbers(-30, 30)), min_size=1, max_size=10))
def test_pairwise_loss_is_minus_the_log_of_the_win_probability(pairs: list[tuple[float, float]]) -> None:
    chosen, rejected = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    expected = [math.log1p(math.exp(r - c)) for c, r in pairs]
    assert_close(pairwise_loss(chosen, rejected), expected)


@given(rows(), clips)
def test_inputs_are_left_as_they_are(x: Rows, clip: Clip) -> None:
    kept = [t.clone() for t in x[1:]]
    policy_loss(sequence_log_ratios(x.new, x.old, x.lengths), x.third, x.weights, **clip.named)
    value_loss(x.new, x.old, x.third, value_clip_range=0.2, factor=0.5)
    kl_loss(x.new, x.old, estimator="k3", estimate_bound=None)
    policy_diagnostics(x.new, x.third, **clip.named)
    value_diagnostics(x.new, x.old, x.third, value_clip_range=0.2)
    assert all(torch.equal(before, after) for before, after in zip(kept, x[1:], strict=True))


def test_gradients_agree_with_finite_differences() -> None:
    torch.manual_seed(0)
    new, old, third = (torch.randn(12, dtype=torch.float64) for _ in range(3))
    new.requires_grad_()
    ones, clip = torch.ones_like(third), Clip(0.2, 0.3, 2.0).named
    assert torch.autograd.gradcheck(lambda n: policy_loss(n - old, third, ones, **clip), (new,))
    assert torch.autograd.gradcheck(lambda n: value_loss(n, old, third, value_clip_range=0.3, factor=0.5), (new,))
    assert torch.autograd.gradcheck(lambda n: kl_loss(n, old, estimator="k3", estimate_bound=None), (new,))
