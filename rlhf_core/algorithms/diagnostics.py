"""What to watch during the update, as sums over tokens: add them up over micro-batches, divide once at the end.

Left out: the division, names of metric files, and entropy, which needs the full distribution.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_core.algorithms.losses import LOG_RATIO_CAP, Tokens
from rlhf_core.errors import RowMismatch

Scalar = Float[Tensor, ""]


@torch.no_grad()
def policy_diagnostics(
    log_ratios: Tokens, advantages: Tokens, *, clip_range: float, clip_range_high: float, dual_clip: float | None
) -> dict[str, Scalar]:
    """Return sums over tokens that describe how far the policy has moved, by the log-ratios that the loss uses.

    With d = log_ratios and ratio = exp(d), d bounded to +-20 as in the loss:
        approxkl       0.5 * d^2, nats (TRL's policy/approxkl_avg); d not bounded
        approxkl_k3    ratio - 1 - d, nats, never negative: estimates KL(old || new)
        clipfrac_low   1 where A < 0 and ratio < 1 - clip_range, so that the gradient is 0
        clipfrac_high  1 where A > 0 and ratio > 1 + clip_range_high, likewise
        clipfrac       their sum
        dual_clipfrac  1 where A < 0 and ratio > dual_clip, likewise; 0 without it
        ratio          ratio
        ratio_squared  ratio^2, for its variance

    Args:
        log_ratios: [N], nats, as for policy_loss.
        advantages: [N].
        clip_range, clip_range_high, dual_clip: As for policy_loss.

    Returns:
        One float64 scalar per name; none carries a gradient.

    Raises:
        RowMismatch: If the shapes differ.
    """
    d, advantage = _wide(log_ratios, advantages)
    bounded = torch.clamp(d, -LOG_RATIO_CAP, LOG_RATIO_CAP)
    ratio = torch.exp(bounded)
    low = (advantage < 0) & (ratio < 1 - clip_range)
    high = (advantage > 0) & (ratio > 1 + clip_range_high)
    dual = (advantage < 0) & (ratio > dual_clip) if dual_clip is not None else torch.zeros_like(low)
    return {
        "approxkl": 0.5 * torch.square(d).sum(),
        "approxkl_k3": torch.clamp(torch.expm1(bounded) - bounded, min=0.0).sum(),
        "clipfrac": (low | high).double().sum(),
        "clipfrac_low": low.double().sum(),
        "clipfrac_high": high.double().sum(),
        "dual_clipfrac": dual.double().sum(),
        "ratio": ratio.sum(),
        "ratio_squared": torch.square(ratio).sum(),
    }


@torch.no_grad()
def value_diagnostics(
    new_values: Tokens, values: Tokens, returns: Tokens, *, value_clip_range: float | None
) -> dict[str, Scalar]:
    """Return sums over states that describe the critic.

        clipfrac       1 where the clipped branch of the value loss is the larger one; 0 without a value_clip_range
        squared_error  (new_values - returns)^2, squared reward units

    Args:
        new_values: [N], reward units, of the critic that is being updated.
        values: [N], reward units, before the update.
        returns: [N], reward units.
        value_clip_range: Reward units, positive; None = unclipped.

    Returns:
        One float64 scalar per name; none carries a gradient.

    Raises:
        RowMismatch: If the shapes differ.
    """
    new, old, target = _wide(new_values, values, returns)
    error = torch.square(new - target)
    clipped = new if value_clip_range is None else torch.clamp(new, old - value_clip_range, old + value_clip_range)
    return {
        "clipfrac": (torch.square(clipped - target) > error).double().sum(),
        "squared_error": error.sum(),
    }


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in float64, and refuse shapes that would broadcast."""
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        found = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise RowMismatch(f"expected tensors of one shape, found {found}")
    return [tensor.double() for tensor in tensors]
