"""Per-token estimators of the KL divergence from samples. Left out: the penalty's coefficient (rewards.py)."""

from typing import Literal

import numpy as np

from rlhf_core.algorithms.ragged import PerToken, check_same_size

# Nats. exp(20) = 4.9e8: far beyond any usable ratio, and still finite in float32 and after squaring.
LOG_RATIO_CAP = 20.0


def kl_estimate(
    logprobs: PerToken,
    ref_logprobs: PerToken,
    *,
    estimator: Literal["k1", "k2", "k3", "absolute"],
    log_ratio_bound: float | None = LOG_RATIO_CAP,
) -> PerToken:
    """Return one estimate of KL(policy || reference) per sampled token.

    With d = logprobs - ref_logprobs:
        k1       = d                   unbiased; negative for about half of the tokens
        k2       = d^2 / 2             biased, low variance
        k3       = exp(-d) - 1 + d     unbiased, never negative
        absolute = |d|                 biased; a token less likely than under the reference costs as much

    In k3, d is bounded below by -log_ratio_bound: at 20, a token that the reference finds more than exp(20) times as
    likely counts as exactly that, 485165174.4 nats, instead of overflowing. The others need no bound.

    Args:
        logprobs: [N], nats, of the sampled tokens under the policy that sampled them.
        ref_logprobs: [N], nats, of the same tokens under the reference, at the same temperature.
        estimator: k1, k2, k3 or absolute.
        log_ratio_bound: Nats, positive; None = none, and k3 overflows to infinity below d = -709.

    Returns:
        [N], float64, nats. Differences are taken in float64, and k3 by expm1: exp(-d) - 1 + d in float32 loses all
        digits where |d| is small, which is where most tokens are.

    Raises:
        RowMismatch: If the lengths differ.

    Source: Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html). The bound is ours.
    """
    check_same_size(logprobs=logprobs, ref_logprobs=ref_logprobs)
    d: PerToken = np.subtract(logprobs, ref_logprobs, dtype=np.float64)
    if estimator == "k1":
        return d
    if estimator == "absolute":
        return np.abs(d)
    if estimator == "k2":
        k2: PerToken = d * d / 2
        return k2
    bounded = d if log_ratio_bound is None else np.maximum(d, -log_ratio_bound)
    with np.errstate(over="ignore"):  # without a bound: the infinity stops the stage where it would be written
        # Rounding in the last bit may leave -1e-33 where the true value is smaller still.
        k3: PerToken = np.maximum(np.expm1(-bounded) + bounded, 0.0)
    return k3


def clipped(kl: PerToken, *, bound: float | None) -> PerToken:
    """Return estimates bounded to [-bound, bound], as verl and OpenRLHF do; see conventions.py.

    Args:
        kl: [N], nats.
        bound: Nats, positive; None = as they are.

    Returns:
        [N], nats.
    """
    return kl if bound is None else np.clip(kl, -bound, bound)
