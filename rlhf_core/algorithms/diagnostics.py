"""What to watch during the update, as sums over real tokens: add them up over micro-batches, divide once at the end.

Left out: the division, names of metric files, and entropy, which needs the full distribution.
"""

import torch
from torch import Tensor

from rlhf_core.algorithms.losses import LOG_RATIO_CAP, Mask, Scalar, Tokens
from rlhf_core.errors import RowMismatch


@torch.no_grad()
def policy_diagnostics(
    new_logprobs: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask, *, clip_range: float
) -> dict[str, Scalar]:
    """Return sums over real tokens that describe how far the policy has moved.

    With d = new_logprobs - logprobs and ratio = exp(d), d bounded to +-20 as in the loss:
        approxkl       0.5 * d^2, nats (TRL's policy/approxkl_avg); d not bounded
        approxkl_k3    ratio - 1 - d, nats, never negative: estimates KL(old || new)
        clipfrac       1 where the clipped branch of the policy loss is the larger one, so that the gradient is 0
        ratio          ratio
        ratio_squared  ratio^2, for its variance
        tokens         1

    Args:
        new_logprobs: [B, T], nats, under the policy that is being updated.
        logprobs: [B, T], nats, under the policy before the update.
        advantages: [B, T].
        mask: [B, T], True = real token; other positions may hold anything.
        clip_range: In (0, 1).

    Returns:
        One float64 scalar per name; none carries a gradient.

    Raises:
        RowMismatch: If the shapes differ.
    """
    new, old, advantage = _kept(mask, new_logprobs, logprobs, advantages)
    difference = new - old
    bounded = torch.clamp(difference, -LOG_RATIO_CAP, LOG_RATIO_CAP)
    ratio = torch.exp(bounded)
    clipped = -advantage * torch.clamp(ratio, 1 - clip_range, 1 + clip_range) > -advantage * ratio
    return {
        "approxkl": 0.5 * torch.square(difference).sum(),
        "approxkl_k3": torch.clamp(torch.expm1(bounded) - bounded, min=0.0).sum(),
        "clipfrac": clipped.double().sum(),
        "ratio": ratio.sum(),
        "ratio_squared": torch.square(ratio).sum(),
        "tokens": mask.sum().double(),
    }


@torch.no_grad()
def value_diagnostics(
    new_values: Tokens, values: Tokens, returns: Tokens, mask: Mask, *, value_clip_range: float
) -> dict[str, Scalar]:
    """Return sums over real tokens that describe the critic.

        clipfrac       1 where the clipped branch of the value loss is the larger one
        squared_error  (new_values - returns)^2, squared reward units
        tokens         1

    Args:
        new_values: [B, T], reward units, of the critic that is being updated.
        values: [B, T], reward units, before the update.
        returns: [B, T], reward units.
        mask: [B, T], True = real token; other positions may hold anything.
        value_clip_range: Reward units, positive.

    Returns:
        One float64 scalar per name; none carries a gradient.

    Raises:
        RowMismatch: If the shapes differ.
    """
    new, old, target = _kept(mask, new_values, values, returns)
    clipped = torch.clamp(new, old - value_clip_range, old + value_clip_range)
    error, clipped_error = torch.square(new - target), torch.square(clipped - target)
    return {
        "clipfrac": (clipped_error > error).double().sum(),
        "squared_error": error.sum(),
        "tokens": mask.sum().double(),
    }


def _kept(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Select the real tokens as flat float64, and refuse shapes that would broadcast."""
    if any(tensor.shape != mask.shape for tensor in tensors):
        found = ", ".join(str(list(tensor.shape)) for tensor in (*tensors, mask))
        raise RowMismatch(f"expected tensors of one shape, found {found}")
    return [tensor[mask].double() for tensor in tensors]
