"""How far the sampler (vLLM) and the trainer disagree about the same tokens under the same weights.

Left out: what to do about it. The score stage measures and stops above a bound.
"""

import numpy as np

from rlhf_core.algorithms.kl import LOG_RATIO_CAP, kl_estimate
from rlhf_core.algorithms.ragged import PerToken, check_same_size

# Of the share reported as clip_fraction. A fixed yardstick, not the clip range of the update, so that runs compare.
CLIP_RANGE = 0.2


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
    check_same_size(sampler_logprobs=sampler_logprobs, logprobs=logprobs)
    if logprobs.size == 0:
        return {"k1": 0.0, "k3": 0.0, "mean_abs": 0.0, "max_abs": 0.0, "clip_fraction": 0.0, "ess": 1.0}
    d = kl_estimate(sampler_logprobs, logprobs, estimator="k1")
    weights = np.exp(np.clip(-d, -LOG_RATIO_CAP, LOG_RATIO_CAP))
    return {
        "k1": float(d.mean()),
        "k3": float(kl_estimate(sampler_logprobs, logprobs, estimator="k3").mean()),
        "mean_abs": float(np.abs(d).mean()),
        "max_abs": float(np.abs(d).max()),
        "clip_fraction": float(np.mean(np.abs(weights - 1) > CLIP_RANGE)),
        "ess": float(weights.sum() ** 2 / (weights.size * np.square(weights).sum())),
    }
