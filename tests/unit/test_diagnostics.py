"""Diagnostics as sums. Numbers: float64 hand sums.

Mutations that must fail here: mask dropped; means instead of sums; clipfrac counting |ratio - 1| > range without the
sign of A; k3 with exp(-d); a gradient left on.
"""

import inspect
import math

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.diagnostics import policy_diagnostics, value_diagnostics
from rlhf_core.errors import RowMismatch
from tests.reference import oracles

RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5]


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def floats(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in sums.items()}


def test_ten_cells_of_ratio_and_advantage() -> None:
    # Clipped: ratio 1.5 with A = 2, and ratio 0.5 with A = -2; so 2 of 10.
    new = tensor([RATIOS, RATIOS]).log()
    advantages = tensor([[2.0] * 5, [-2.0] * 5])
    found = floats(
        policy_diagnostics(new, torch.zeros_like(new), advantages, torch.ones(2, 5, dtype=torch.bool), clip_range=0.2)
    )
    logs = [math.log(ratio) for ratio in RATIOS]
    assert found == pytest.approx(
        {
            "approxkl": sum(d * d for d in logs),
            "approxkl_k3": 2 * sum(r - 1 - d for r, d in zip(RATIOS, logs, strict=True)),
            "clipfrac": 2,
            "ratio": 10,
            "ratio_squared": 2 * (0.25 + 0.81 + 1 + 1.21 + 2.25),
            "tokens": 10,
        },
        rel=1e-9,
    )
    assert found["clipfrac"] / found["tokens"] == pytest.approx(0.2, rel=1e-12)


def test_an_advantage_of_zero_is_never_clipped() -> None:
    new, zeros = tensor([RATIOS]).log(), torch.zeros(1, 5, dtype=torch.float64)
    assert policy_diagnostics(new, zeros, zeros, torch.ones(1, 5, dtype=torch.bool), clip_range=0.2)["clipfrac"] == 0


def test_nothing_has_moved_before_the_first_update() -> None:
    logprobs = torch.tensor([[-0.1, -2.0]])
    found = policy_diagnostics(
        logprobs, logprobs.clone(), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), clip_range=0.2
    )
    expected = {"approxkl": 0, "approxkl_k3": 0, "clipfrac": 0, "ratio": 2, "ratio_squared": 2, "tokens": 2}
    assert floats(found) == expected


@pytest.mark.parametrize("token, mixed", [(0, 1.303007), (1, 0.479349), (2, 0.176343)])
def test_ratio_is_one_only_if_both_sides_use_the_same_temperature(token: int, mixed: float) -> None:
    # Logits [2, 1, 0]; log-softmax raw and at temperature 0.5.
    raw, cooled = (tensor([[oracles.log_softmax([2, 1, 0], temperature)[token]]]) for temperature in (1.0, 0.5))
    one, mask = torch.ones_like(raw), torch.ones(1, 1, dtype=torch.bool)
    for new, old, ratio in [(raw, raw, 1.0), (cooled, cooled, 1.0), (cooled, raw, mixed)]:
        found = policy_diagnostics(new, old, one, mask, clip_range=0.2)["ratio"].item()
        assert found == pytest.approx(ratio, abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_positions_are_as_if_dropped(poison: float) -> None:
    mask = torch.tensor([[True, False, True]])
    inputs = [tensor([[-0.3, poison, -0.1]]) * (i + 1) for i in range(3)]
    kept, all_real = [x[:, [0, 2]] for x in inputs], torch.ones(1, 2, dtype=torch.bool)
    assert floats(policy_diagnostics(*inputs, mask, clip_range=0.05)) == floats(
        policy_diagnostics(*kept, all_real, clip_range=0.05)
    )
    assert floats(value_diagnostics(*inputs, mask, value_clip_range=0.05)) == floats(
        value_diagnostics(*kept, all_real, value_clip_range=0.05)
    )


def test_sums_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    torch.manual_seed(0)
    inputs, mask = [torch.randn(4, 5) * 0.3 for _ in range(3)], torch.rand(4, 5) > 0.3
    for function, clip in [(policy_diagnostics, "clip_range"), (value_diagnostics, "value_clip_range")]:
        whole = floats(function(*inputs, mask, **{clip: 0.2}))
        parts = [floats(function(*(x[rows] for x in inputs), mask[rows], **{clip: 0.2})) for rows in ([0], [1, 2, 3])]
        assert whole == pytest.approx({name: parts[0][name] + parts[1][name] for name in whole}, rel=1e-12)


def test_no_real_tokens_add_nothing() -> None:
    x, mask = torch.full((1, 2), math.nan), torch.zeros(1, 2, dtype=torch.bool)
    assert set(floats(policy_diagnostics(x, x, x, mask, clip_range=0.2)).values()) == {0.0}
    assert set(floats(value_diagnostics(x, x, x, mask, value_clip_range=0.2)).values()) == {0.0}


def test_finite_at_huge_log_ratios_and_free_of_gradients() -> None:
    new = torch.tensor([[1e4, -1e4]], requires_grad=True)
    found = policy_diagnostics(
        new, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), clip_range=0.2
    )
    assert all(math.isfinite(value) for value in floats(found).values())
    assert not any(value.requires_grad for value in found.values())


def test_value_diagnostics() -> None:
    # The four tokens of test_losses' value loss: only R = 2, new 2 has the clipped branch larger.
    # Squared errors: 0.64 + 0 + 4 + 4.
    new, returns = tensor([[1.2, 2.0, 2.0, 0.0]]), tensor([[2.0, 2.0, 0.0, 2.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    found = floats(value_diagnostics(new, torch.ones_like(new), returns, mask, value_clip_range=0.3))
    assert found == pytest.approx({"clipfrac": 1, "squared_error": 8.64, "tokens": 4}, rel=1e-12)


def test_shapes_that_would_broadcast_are_refused() -> None:
    x, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(RowMismatch, match=r"\[2, 3\], \[2, 1\], \[2, 3\], \[2, 3\]"):
        inspect.unwrap(policy_diagnostics)(x, x[:, :1], x, mask, clip_range=0.2)
