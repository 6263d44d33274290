"""How far the sampler (vLLM) and the trainer disagree about the same tokens under the same weights.

Left out: what to do about it. The score stage measures and stops above a bound.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_core.algorithms.kl import LOG_RATIO_CAP, kl_estimate
from rlhf_core.algorithms.ragged import PerToken, check_same_size

# Of the share reported as clip_fraction. A fixed yardstick, not the clip range of the update, so that runs compare.
CLIP_RANGE = 0.2
_SUMS = ("tokens", "k1", "k3", "abs", "clipped", "weights", "squared_weights")


def mismatch(sampler_logprobs: PerToken, logprobs: PerToken) -> dict[str, float]:
    """Return measures of the disagreement, over all tokens.

    With d_t = sampler_logprobs_t - logprobs_t and w_t = exp(-d_t), the importance weight of the trainer's policy:
        k1            mean of d, nats: estimates KL(sampler || trainer)
        k3            mean of exp(-d) - 1 + d, nats: the same, never negative; d bounded as in kl_estimate
        mean_abs      mean |d|, nats
        max_abs       max |d|, nats
        clip_fraction share of tokens with |w - 1| > 0.2: already outside a usual clip range before any update
        ess           (sum w)^2 / (N * sum w^2), in (0, 1]: effective share of the samples; |d| bounded by 20

    Args:
        sampler_logprobs: [N], nats, as the sampler reported them.
        logprobs: [N], nats, of the same tokens by the trainer's forward pass, at the same temperature.

    Returns:
        The six measures by name, finite for finite input. No tokens: 0 everywhere and ess 1.

    Raises:
        RowMismatch: If the lengths differ.

    Source: ess: Kong 1992, "A note on importance sampling using standardized weights", as a share of N.
    """
    return mismatch_of([mismatch_sums(sampler_logprobs, logprobs)])


def mismatch_sums(sampler_logprobs: PerToken, logprobs: PerToken) -> dict[str, float]:
    """Return what `mismatch` of these and other tokens together is made of, in a few numbers.

    Args:
        sampler_logprobs: [N], nats, of some of the tokens.
        logprobs: [N], nats, of the same.

    Returns:
        Sums over the tokens, and the largest |d|; what mismatch_of takes.

    Raises:
        RowMismatch: If the lengths differ.
    """
    check_same_size(sampler_logprobs=sampler_logprobs, logprobs=logprobs)
    d = kl_estimate(sampler_logprobs, logprobs, estimator="k1")
    weights = np.exp(np.clip(-d, -LOG_RATIO_CAP, LOG_RATIO_CAP))
    return {
        "tokens": float(d.size),
        "k1": float(d.sum()),
        "k3": float(kl_estimate(sampler_logprobs, logprobs, estimator="k3").sum()),
        "abs": float(np.abs(d).sum()),
        "max_abs": float(np.abs(d).max(initial=0.0)),
        "clipped": float(np.sum(np.abs(weights - 1) > CLIP_RANGE)),
        "weights": float(weights.sum()),
        "squared_weights": float(np.square(weights).sum()),
    }


def mismatch_of(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return `mismatch` over the tokens of all parts.

    Args:
        parts: From mismatch_sums; none is the same as no tokens.
    """
    totals = {name: math.fsum(part[name] for part in parts) for name in _SUMS}
    tokens = totals["tokens"]
    if not tokens:
        return {"k1": 0.0, "k3": 0.0, "mean_abs": 0.0, "max_abs": 0.0, "clip_fraction": 0.0, "ess": 1.0}
    return {
        "k1": totals["k1"] / tokens,
        "k3": totals["k3"] / tokens,
        "mean_abs": totals["abs"] / tokens,
        "max_abs": max(part["max_abs"] for part in parts),
        "clip_fraction": totals["clipped"] / tokens,
        "ess": totals["weights"] ** 2 / (tokens * totals["squared_weights"]),
    }
