"""The loss of a minibatch and all its gradients, against the textbook's formulas in float64, for every set of options.

The second implementation is written response by response, from the papers, and leaves differentiation to torch.

Mutations that must fail here: sign of the entropy bonus; value_coef dropped; entropy or KL term as a token mean
whatever the aggregation; entropy without gradient; slots left out of the value loss; a micro-batch divided by its own
counts.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_core.models.batching import Batch
from rlhf_core.models.forward import TokenOutputs
from rlhf_core.training.ppo_loss import Settings, Whole, micro_batch_loss
from rlhf_core.training.responses import Responses
from tests.ppo_case import settings

LENGTHS = [3, 1, 5, 2, 7]
ENDS = np.cumsum([0, *LENGTHS])
N, ROWS = int(ENDS[-1]), len(LENGTHS)
MINIBATCH, PARTS = [0, 2, 3, 4], [[4, 0], [2], [3]]  # response 1 is in another minibatch
SLOTS = [None, 0.3, None, -1.2, 2.0]
CLIP = 0.2
OPTIONS = list(
    itertools.product(
        ["token", "sequence"],
        ["token_mean", "sequence_mean", "constant"],
        [None, 1.05, 3.0],  # dual_clip
        ["k1", "k2", "k3", "absolute"],
        [None, 0.3],  # value_clip_range
        [0.2, 0.5],  # clip_range_high
        [None, 0.5],  # bound of the KL estimate
    )
)


def rows(column: np.ndarray) -> list[np.ndarray]:
    return [column[start:stop] for start, stop in itertools.pairwise(ENDS)]


def draw(seed: int) -> tuple[Responses, list[Tensor]]:
    """Responses before the update, and logprobs, entropy, values and bootstrap values of what is being updated."""
    random = np.random.default_rng(seed)
    normal = lambda size: random.normal(size=size).astype(np.float32)
    weights = (random.uniform(0, 2, N) * (random.uniform(size=N) > 0.2)).astype(np.float32)
    logprobs, ref_logprobs, advantages, values, returns = (normal(N) for _ in range(5))
    bootstrap = normal(ROWS)
    responses = Responses(
        [str(row) for row in range(ROWS)], [[1]] * ROWS, [[1] * length for length in LENGTHS],
        *(rows(x) for x in (logprobs - 2, ref_logprobs - 2, weights, advantages, values, returns)),
        bootstrap.tolist(), SLOTS,
    )  # fmt: skip
    entropy = random.uniform(1, 2, N).astype(np.float32)
    new = [logprobs - 2 + normal(N) / 2, entropy, values + normal(N) / 2, bootstrap + normal(ROWS) / 2]
    return responses, [torch.from_numpy(x.astype(np.float32)) for x in new]


def shipped(responses: Responses, new: list[Tensor], chosen: Settings) -> tuple[float, list[Tensor]]:
    """Loss and gradients, micro-batch by micro-batch."""
    leaves = [x.clone().requires_grad_() for x in new]
    whole, total = Whole.of(responses, MINIBATCH), 0.0
    for part in PARTS:
        tokens = torch.cat([torch.arange(ENDS[row], ENDS[row + 1]) for row in part])
        outputs = TokenOutputs(leaves[0][tokens], leaves[1][tokens], leaves[2][tokens], leaves[3][torch.tensor(part)])
        missing: Any = None
        batch = Batch(part, *[missing] * 6, [LENGTHS[row] for row in part])
        loss, _, _ = micro_batch_loss(outputs, responses, batch, whole, chosen)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total, [leaf.grad for leaf in leaves if leaf.grad is not None]


def textbook(responses: Responses, new: list[Tensor], chosen: Settings) -> tuple[float, list[Tensor]]:
    """The same in float64, response by response."""
    leaves = [x.double().requires_grad_() for x in new]
    policy, value, states = [], [], 0
    tokens = sum(LENGTHS[row] for row in MINIBATCH)
    for row in MINIBATCH:
        part = slice(ENDS[row], ENDS[row + 1])
        per_token = policy_terms(responses, row, leaves[0][part], chosen) - chosen.entropy_coef * leaves[1][part]
        policy.append(
            {
                "token_mean": per_token.sum() / tokens,
                "sequence_mean": per_token.mean() / len(MINIBATCH),
                "constant": per_token.sum() / chosen.aggregation_constant / len(MINIBATCH),
            }[chosen.aggregation]
        )
        old, target = torch.tensor(responses.values[row]).double(), torch.tensor(responses.returns[row]).double()  # type: ignore[index]
        value.append(value_terms(leaves[2][part], old, target, chosen))
        states += LENGTHS[row]
        if (after := SLOTS[row]) is not None:
            old = torch.tensor(responses.bootstrap_value[row]).double()  # type: ignore[index]
            value.append(value_terms(leaves[3][row], old, torch.tensor(after).double(), chosen))
            states += 1
    loss = sum(policy) + chosen.value_coef * sum(value) / states
    loss.backward()  # type: ignore[union-attr]
    return float(loss.detach()), [leaf.grad for leaf in leaves if leaf.grad is not None]


def policy_terms(responses: Responses, row: int, new: Tensor, chosen: Settings) -> Tensor:
    """The clipped objective (Schulman et al. 2017, eq. 7; Ye et al. 2020; Zheng et al. 2025, GSPO-token) and the KL."""
    old, reference, weight, advantage = (
        torch.tensor(getattr(responses, name)[row]).double()
        for name in ("logprobs", "ref_logprobs", "importance_weights", "advantages")
    )
    ratio = torch.exp(new - old)
    if chosen.ratio == "sequence":
        ratio = torch.exp((new - old).mean()).detach() * torch.exp(new - new.detach())
    objective = torch.min(ratio * advantage, torch.clamp(ratio, 1 - CLIP, 1 + chosen.clip_range_high) * advantage)
    if chosen.dual_clip is not None:
        objective = torch.where(advantage < 0, torch.max(objective, chosen.dual_clip * advantage), objective)
    d = new - reference
    kl = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d, "absolute": d.abs()}[chosen.kl_loss_estimator]
    if chosen.kl_estimate_bound is not None:
        kl = kl.clamp(-chosen.kl_estimate_bound, chosen.kl_estimate_bound)
    return -weight * objective + chosen.kl_loss_coef * kl


def value_terms(new: Tensor, old: Tensor, target: Tensor, chosen: Settings) -> Tensor:
    """Half the squared error, or the larger one of the clipped value."""
    error = (new - target) ** 2
    if chosen.value_clip_range is not None:
        moved = torch.clamp(new, old - chosen.value_clip_range, old + chosen.value_clip_range)
        error = torch.max(error, (moved - target) ** 2)
    return 0.5 * error.sum()


@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradients_are_the_textbook_s_for_every_set_of_options(seed: int) -> None:
    responses, new = draw(seed)
    assert len(OPTIONS) == 576
    for ratio, aggregation, dual_clip, estimator, value_clip_range, high, bound in OPTIONS:
        chosen = settings(
            ratio=ratio, aggregation=aggregation, dual_clip=dual_clip, kl_loss_estimator=estimator, clip_range=CLIP,
            value_clip_range=value_clip_range, clip_range_high=high, kl_estimate_bound=bound, kl_loss_coef=0.3,
            entropy_coef=0.05, value_coef=0.7, aggregation_constant=9.0,
        )  # fmt: skip
        (loss, gradients), (expected, wanted) = shipped(responses, new, chosen), textbook(responses, new, chosen)
        assert loss == pytest.approx(expected, abs=1e-6), chosen
        for gradient, other in zip(gradients, wanted, strict=True):
            assert torch.allclose(gradient.double(), other, atol=1e-6, rtol=0), chosen
