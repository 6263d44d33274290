"""AdamW with moments in 8 bits: near AdamW's steps, and states that survive a kill bit by bit and an iteration nearly.

Mutations that must fail here: codes put back without their scale; moments written as codes; a rate that is not set.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.models.checkpoint import OptimizerState
from rlhf_core.training.optimizer import (
    adamw,
    captured,
    clip_and_step,
    put_training_state,
    restore,
    schedule,
    training_state,
)

pytest.importorskip("torchao", reason="torchao is not installed (optional: pip install --no-deps torchao==0.18.0)")

EMPTY = OptimizerState(steps={}, episode=0, first_moments={}, second_moments={})
SHAPES = {"large": (64, 128), "small": (10,)}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """torch.compile needs a C++ compiler and time; the step is the same Python without it."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Run:
    """Some parameters, an optimiser of a kind, and its schedule."""

    def __init__(self, kind: Any, *, first_step: int = 0) -> None:
        torch.manual_seed(0)
        self.named = [(name, nn.Parameter(torch.randn(shape))) for name, shape in SHAPES.items()]
        self.optimizer = adamw([(self.named, 0.01)], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, kind=kind)
        self.scheduler = schedule(self.optimizer, name="linear", warmup_steps=2, total_steps=100, first_step=first_step)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            for _, parameter in self.named:
                parameter.grad = torch.randn(parameter.shape)
            groups = {"grad_norm": [parameter for _, parameter in self.named]}
            clip_and_step(self.optimizer, self.scheduler, groups, max_grad_norm=1e9, where="here")

    def moments(self) -> dict[str, Tensor]:
        found = captured(self.optimizer, {"policy": self.named}, EMPTY, steps=1, episode=0)
        return {
            f"{kind}/{name}": moment
            for kind, moments in (("first", found.first_moments), ("second", found.second_moments))
            for name, moment in moments.items()
        }


def test_steps_are_near_those_with_moments_in_float32() -> None:
    whole, short = Run("adamw"), Run("adamw_8bit")
    before = [parameter.detach().clone() for _, parameter in whole.named]
    for run in (whole, short):
        run.steps(0, 20)
    for (name, exact), (_, near), start in zip(whole.named, short.named, before, strict=True):
        moved = (exact - start).norm()
        assert (near - exact).norm() < (1e-5 if name == "small" else 0.03) * moved, name


def test_what_is_written_are_floats_near_the_moments() -> None:
    whole, short = Run("adamw"), Run("adamw_8bit")
    for run in (whole, short):
        run.steps(0, 1)
    for name, exact in whole.moments().items():
        near = short.moments()[name]
        assert near.dtype == torch.float32
        # The largest gap between two codes is 1.4 % of their block's largest number.
        assert (near - exact).abs().max() <= 0.014 * exact.abs().max(), name


def test_moments_take_a_quarter_of_the_memory() -> None:
    run = Run("adamw_8bit")
    run.steps(0, 1)
    states = training_state(run.optimizer, run.named)
    large = sum(value.nbytes for key, value in states.items() if key.startswith("exp_avg") and "large" in key)
    assert large == 2 * (64 * 128 + 4 * 64 * 128 // 256)  # a byte each, and a float for 256 of them
    assert states["exp_avg/small"].dtype == torch.float32


def test_a_killed_run_goes_on_bit_by_bit() -> None:
    straight, killed = Run("adamw_8bit"), Run("adamw_8bit")
    straight.steps(0, 6)
    killed.steps(0, 3)
    kept = {name: tensor.clone() for name, tensor in training_state(killed.optimizer, killed.named).items()}
    again = Run("adamw_8bit")
    put_training_state(again.optimizer, again.scheduler, again.named, kept, schedule_step=3)
    again.steps(3, 6)
    found, expected = (training_state(run.optimizer, run.named) for run in (again, straight))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_next_iteration_goes_on_from_either_optimiser_s_checkpoint() -> None:
    first = Run("adamw")
    first.steps(0, 5)
    state = captured(first.optimizer, {"policy": first.named}, EMPTY, steps=5, episode=0)
    second = Run("adamw_8bit", first_step=5)
    restore(second.optimizer, {"policy": second.named}, state, trained={"policy"})
    for name, moment in second.moments().items():
        assert (moment - first.moments()[name]).abs().max() <= 0.02 * moment.abs().max()
    assert float(second.optimizer.param_groups[0]["lr"]) == pytest.approx(0.01 * (100 - 5) / (100 - 2))
    second.steps(5, 6)
    assert second.optimizer.state[second.named[0][1]]["step"] == 6
