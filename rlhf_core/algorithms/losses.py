"""Losses of the policy, the critic and the reward model, per token or per pair.

Left out: how they are weighted and divided (rlhf_core/training). Sums over tokens, divided once by the count of the
whole minibatch, do not depend on how it was split into micro-batches; a mean of means does.
A mask is True at real response tokens. Positions where it is False may hold anything, NaN included: they are replaced
before any arithmetic, because 0 * NaN is NaN in a backward pass.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from rlhf_core.errors import NumericError, RowMismatch

# Batched arrays have the shape [B, T] (rows, tokens) or any other that all arguments of a call share.
Tokens = Float[Tensor, "*batch"]
Mask = Bool[Tensor, "*batch"]
Pairs = Float[Tensor, "pairs"]
Scalar = Float[Tensor, ""]

# Nats. exp(20) = 4.9e8 is finite in float32, and so is its product with any advantage of sane size.
LOG_RATIO_CAP = 20.0


def policy_loss(
    new_logprobs: Tokens, logprobs: Tokens, advantages: Tokens, mask: Mask | None = None, *, clip_range: float
) -> Tokens:
    """Return the clipped policy loss of each token.

        ratio = exp(new_logprobs - logprobs)
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_range, 1 + clip_range))

    The log-ratio is bounded to +-20 before exp. A token beyond that has a finite loss and no gradient: its importance
    weight means nothing any more, and its gradient would drown all others.

    Args:
        new_logprobs: [B, T], float32, nats, under the policy that is being updated; carries the gradient.
        logprobs: [B, T], nats, the same tokens under the policy before the update.
        advantages: [B, T].
        mask: [B, T], True = real token. None = all are real; then every position must be finite.
        clip_range: In (0, 1).

    Returns:
        [B, T]; 0, with gradient 0, where the mask is False.

    Raises:
        RowMismatch: If the shapes differ.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7, negated. The bound is ours.
    """
    new_logprobs, logprobs, advantages = _real(mask, new_logprobs, logprobs, advantages)
    ratio = torch.exp(torch.clamp(new_logprobs - logprobs, -LOG_RATIO_CAP, LOG_RATIO_CAP))
    return torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - clip_range, 1 + clip_range))


def value_loss(
    new_values: Tokens, values: Tokens, returns: Tokens, mask: Mask | None = None, *, value_clip_range: float
) -> Tokens:
    """Return the clipped value loss of each token.

        clipped = clip(new_values, values - value_clip_range, values + value_clip_range)
        loss    = 0.5 * max((new_values - returns)^2, (clipped - returns)^2)

    Args:
        new_values: [B, T], float32, reward units, of the critic that is being updated; carries the gradient.
        values: [B, T], reward units, before the update.
        returns: [B, T], reward units.
        mask: [B, T], True = real token. None = all are real; then every position must be finite.
        value_clip_range: Reward units, positive.

    Returns:
        [B, T], squared reward units; 0, with gradient 0, where the mask is False.

    Raises:
        RowMismatch: If the shapes differ.

    Source: openai/baselines, ppo2 (not in the paper); the 0.5 is theirs.
    """
    new_values, values, returns = _real(mask, new_values, values, returns)
    clipped = torch.clamp(new_values, values - value_clip_range, values + value_clip_range)
    return 0.5 * torch.maximum(torch.square(new_values - returns), torch.square(clipped - returns))


def pairwise_loss(chosen: Pairs, rejected: Pairs) -> Pairs:
    """Return the Bradley-Terry loss of each preference pair: -log sigmoid(chosen - rejected).

    Args:
        chosen: [B], reward units, scores of the preferred responses.
        rejected: [B], reward units, scores of the others.

    Returns:
        [B], nats; ln 2 for equal scores, and growing like the margin, not overflowing, for pairs that are badly wrong.

    Raises:
        RowMismatch: If the lengths differ.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback", eq. 1.
    """
    chosen, rejected = _real(None, chosen, rejected)
    return -functional.logsigmoid(chosen - rejected)


def masked_sum(x: Tokens, mask: Mask) -> Scalar:
    """Return the sum of x where the mask is True.

    Args:
        x: [B, T], any unit; masked positions may hold anything.
        mask: [B, T], True = counted.

    Returns:
        A scalar in the unit of x; its gradient is 0 at masked positions.

    Raises:
        RowMismatch: If the shapes differ.
    """
    return _real(mask, x)[0].sum()


def masked_mean(x: Tokens, mask: Mask) -> Scalar:
    """Return the mean of x where the mask is True: masked_sum(x, mask) / number of True.

    Not for micro-batches: the mean of their means is not the mean of the batch.

    Args:
        x: [B, T], any unit; masked positions may hold anything.
        mask: [B, T], True = counted.

    Returns:
        A scalar in the unit of x.

    Raises:
        NumericError: If the mask is False everywhere.
        RowMismatch: If the shapes differ.
    """
    count = mask.sum()
    if not count:
        raise NumericError(
            f"masked_mean: expected at least one real token, found none in a mask of shape {list(mask.shape)}"
        )
    return masked_sum(x, mask) / count


def _real(mask: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Replace masked positions by 0, and refuse shapes that would broadcast."""
    shapes = [tensor.shape for tensor in tensors] + ([] if mask is None else [mask.shape])
    if any(shape != shapes[0] for shape in shapes):
        raise RowMismatch(f"expected tensors of one shape, found {', '.join(str(list(shape)) for shape in shapes)}")
    if mask is None:
        return list(tensors)
    return [torch.where(mask, tensor, torch.zeros_like(tensor)) for tensor in tensors]
