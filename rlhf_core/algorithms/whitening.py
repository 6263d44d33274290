"""Whitening over all tokens of an iteration. Left out: per-shard or per-process variants, which give other numbers."""

import logging
from typing import Literal

import numpy as np

from rlhf_core.algorithms.moments import Summary
from rlhf_core.algorithms.ragged import PerToken
from rlhf_core.errors import NumericError

logger = logging.getLogger("rlhf")

# Keeps nearly constant input finite.
EPSILON = 1e-8


def whiten(
    x: PerToken,
    whole: Summary,
    *,
    shift_mean: bool,
    variance: Literal["population", "bessel"],
    epsilon: Literal["added", "floor"],
) -> PerToken:
    """Return x at unit variance: around 0, or around its own mean.

        y = (x - mean) / scale            shift_mean=True
        y = (x - mean) / scale + mean     shift_mean=False: scale only, and the mean put back

        var   = sum of (x - mean)^2 / n            population
                sum of (x - mean)^2 / (n - 1)      bessel
        scale = sqrt(var + 1e-8)                   added
                sqrt(max(var, 1e-8))               floor

    Args:
        x: [N], any unit; a part of the tokens that mean and variance are of, or all.
        whole: Of the tokens of the whole iteration, and of nothing else.
        shift_mean: Whether the mean is removed.
        variance: population or bessel.
        epsilon: added or floor.

    Returns:
        [N], float64; a new array. Equal values, of which a single one is a case, come out as exactly 0 (or as their
        mean), with bessel too; a single one is also worth a warning. Empty in, empty out.

    Raises:
        NumericError: If there is a NaN or an infinity, which would spread to all tokens.

    Source: openai/lm-human-preferences, utils/core.py `whiten` (population, added); the mean put back for
    shift_mean=False is theirs and TRL's. TRL and verl divide by n - 1; OpenRLHF has the floor. See conventions.py.
    """
    if x.size == 0:
        return np.empty(0, np.float64)
    if whole.count == 1:
        logger.warning("whitening a single token: its variance is 0, so the result says nothing about it")
    if not np.isfinite(whole.mean):
        bad = np.flatnonzero(~np.isfinite(x))
        where = f"{x[bad[0]]} at index {bad[0]} of {x.size}" if bad.size else "another one in the other responses"
        raise NumericError(f"whiten: expected finite numbers, found {where}")
    degrees = whole.count - 1 if variance == "bessel" and whole.count > 1 else whole.count
    var = whole.m2 / degrees
    white: PerToken = np.subtract(x, whole.mean, dtype=np.float64)
    white /= np.sqrt(var + EPSILON if epsilon == "added" else max(var, EPSILON))
    return white if shift_mean else white + whole.mean
