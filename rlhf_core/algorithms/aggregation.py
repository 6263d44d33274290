"""How the losses of a minibatch's tokens become one number: a weight for each token."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from rlhf_core.errors import NumericError

Weights = Float64[Tensor, "tokens"]


def token_weights(
    lengths: Sequence[int],
    *,
    aggregation: Literal["token_mean", "sequence_mean", "constant"],
    tokens: int,
    responses: int,
    constant: float,
) -> Weights:
    """Return the weight of each token, so that the minibatch's loss is sum_t weight_t * loss_t.

        token_mean     1 / tokens                    mean over all tokens: long responses count more
        sequence_mean  1 / (responses * T_i)         mean over responses of each one's token mean
        constant       1 / (responses * constant)    mean over responses of each one's token sum over a fixed length

    Sums of such terms over micro-batches, or over processes, add up to the whole minibatch's loss however it was split,
    because tokens and responses are those of the whole. A mean of means would depend on the split.

    Args:
        lengths: Tokens of each row of this part, 1 or more.
        aggregation: token_mean, sequence_mean or constant.
        tokens: Response tokens of the whole minibatch.
        responses: Rows of the whole minibatch.
        constant: Tokens; the fixed length, read by constant alone.

    Returns:
        [N], float64, row after row. In float64 the sum of a minibatch depends still less on its split.

    Raises:
        NumericError: If the whole has no tokens or no responses.

    Source: token_mean: Yu et al. 2025, "DAPO". sequence_mean: Shao et al. 2024, "DeepSeekMath". constant: Liu et al.
    2025, "Understanding R1-Zero-like training: a critical perspective" (Dr. GRPO).
    """
    if tokens < 1 or responses < 1:
        raise NumericError(f"expected a minibatch with tokens, found {tokens} tokens in {responses} responses")
    if aggregation == "token_mean":
        per_row = [1 / tokens for _ in lengths]
    elif aggregation == "sequence_mean":
        per_row = [1 / (responses * length) for length in lengths]
    else:
        per_row = [1 / (responses * constant) for _ in lengths]
    return torch.tensor(per_row, dtype=torch.float64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
