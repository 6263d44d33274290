"""Diagnostics as sums. Numbers: float64 hand sums.

Mutations that must fail here: means instead of sums; clipfrac counting |ratio - 1| > range without the sign of A;
low and high swapped; k3 with exp(-d); a gradient left on.
"""

import inspect
import math

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.diagnostics import policy_diagnostics, value_diagnostics
from rlhf_core.algorithms.losses import sequence_log_ratios
from rlhf_core.errors import RowMismatch
from tests.reference import oracles

RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5]


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def floats(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in sums.items()}


def of_policy(
    log_ratios: Tensor, advantages: Tensor, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> dict[str, float]:
    return floats(policy_diagnostics(log_ratios, advantages, clip_range=low, clip_range_high=high, dual_clip=dual))


def test_ten_cells_of_ratio_and_advantage() -> None:
    # Clipped: ratio 1.5 with A = 2, and ratio 0.5 with A = -2; so 2 of 10.
    found = of_policy(tensor(RATIOS + RATIOS).log(), tensor([2.0] * 5 + [-2.0] * 5))
    logs = [math.log(ratio) for ratio in RATIOS]
    assert found == pytest.approx(
        {
            "approxkl": sum(d * d for d in logs),
            "approxkl_k3": 2 * sum(r - 1 - d for r, d in zip(RATIOS, logs, strict=True)),
            "clipfrac": 2,
            "clipfrac_low": 1,
            "clipfrac_high": 1,
            "dual_clipfrac": 0,
            "ratio": 10,
            "ratio_squared": 2 * (0.25 + 0.81 + 1 + 1.21 + 2.25),
        },
        rel=1e-9,
    )


def test_each_side_is_counted_by_its_own_range_and_dual_clip_apart() -> None:
    # Range [0.8, 1.4], dual clip 3. A = 1: 1.5 and 5 are high, 1.3 is not. A = -1: 0.5 is low, 5 is dual, 1.2 neither.
    log_ratios = tensor([1.5, 5.0, 1.3, 0.5, 5.0, 1.2]).log()
    found = of_policy(log_ratios, tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]), low=0.2, high=0.4, dual=3.0)
    counts = {name: found[name] for name in ("clipfrac", "clipfrac_low", "clipfrac_high", "dual_clipfrac")}
    assert counts == {"clipfrac": 3, "clipfrac_low": 1, "clipfrac_high": 2, "dual_clipfrac": 1}


def test_with_sequence_ratios_they_describe_the_sequences() -> None:
    # Token ratios 1.5 and 1 / 1.5: both outside the range; the response's ratio is 1.
    new, zeros = tensor([1.5, 1 / 1.5]).log(), tensor([0.0, 0.0])
    found = of_policy(sequence_log_ratios(new, zeros, [2]), tensor([1.0, -1.0]))
    assert found["clipfrac"] == 0 and found["ratio"] == pytest.approx(2, rel=1e-12)


def test_an_advantage_of_zero_is_never_clipped() -> None:
    found = of_policy(tensor(RATIOS).log(), torch.zeros(5, dtype=torch.float64), dual=1.1)
    assert found["clipfrac"] == found["dual_clipfrac"] == 0


def test_nothing_has_moved_before_the_first_update() -> None:
    found = of_policy(torch.zeros(2), torch.ones(2))
    assert {name for name, value in found.items() if value} == {"ratio", "ratio_squared"}
    assert found["ratio"] == found["ratio_squared"] == 2


@pytest.mark.parametrize("token, mixed", [(0, 1.303007), (1, 0.479349), (2, 0.176343)])
def test_ratio_is_one_only_if_both_sides_use_the_same_temperature(token: int, mixed: float) -> None:
    # Logits [2, 1, 0]; log-softmax raw and at temperature 0.5.
    raw, cooled = (tensor([oracles.log_softmax([2, 1, 0], temperature)[token]]) for temperature in (1.0, 0.5))
    for new, old, ratio in [(raw, raw, 1.0), (cooled, cooled, 1.0), (cooled, raw, mixed)]:
        assert of_policy(new - old, torch.ones_like(raw))["ratio"] == pytest.approx(ratio, abs=1e-6)


def test_sums_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    torch.manual_seed(0)
    x, y, z = (torch.randn(20) * 0.3 for _ in range(3))
    parts = [slice(0, 5), slice(5, 20)]
    for whole, found in [
        (of_policy(x, y), [of_policy(x[part], y[part]) for part in parts]),
        (of_value(x, y, z), [of_value(x[part], y[part], z[part]) for part in parts]),
    ]:
        assert whole == pytest.approx({name: found[0][name] + found[1][name] for name in whole}, rel=1e-12)


def test_no_tokens_add_nothing() -> None:
    x = torch.zeros(0)
    assert set(of_policy(x, x).values()) == set(of_value(x, x, x).values()) == {0.0}


def test_finite_at_huge_log_ratios_and_free_of_gradients() -> None:
    log_ratios = torch.tensor([1e4, -1e4], requires_grad=True)
    found = policy_diagnostics(log_ratios, torch.ones(2), clip_range=0.2, clip_range_high=0.2, dual_clip=None)
    assert all(math.isfinite(value) for value in floats(found).values())
    assert not any(value.requires_grad for value in found.values())


def of_value(new: Tensor, old: Tensor, returns: Tensor, clip: float | None = 0.3) -> dict[str, float]:
    return floats(value_diagnostics(new, old, returns, value_clip_range=clip))


def test_value_diagnostics() -> None:
    # The four states of test_losses' value loss: only R = 2, new 2 has the clipped branch larger.
    # Squared errors: 0.64 + 0 + 4 + 4.
    new, returns = tensor([1.2, 2.0, 2.0, 0.0]), tensor([2.0, 2.0, 0.0, 2.0])
    found = of_value(new, torch.ones_like(new), returns)
    assert found == pytest.approx({"clipfrac": 1, "squared_error": 8.64}, rel=1e-12)
    assert of_value(new, torch.ones_like(new), returns, None)["clipfrac"] == 0


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(RowMismatch, match=r"\[3\], \[1\]"):
        inspect.unwrap(policy_diagnostics)(
            torch.ones(3), torch.ones(1), clip_range=0.2, clip_range_high=0.2, dual_clip=None
        )
