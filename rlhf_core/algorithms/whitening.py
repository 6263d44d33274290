"""Whitening over all tokens of an iteration. Left out: per-shard or per-process variants, which give other numbers."""

import logging

import numpy as np

from rlhf_core.algorithms.ragged import PerToken
from rlhf_core.errors import NumericError

logger = logging.getLogger("rlhf")

# Keeps constant input finite. It is added to the variance, as in the OpenAI code and TRL.
EPSILON = 1e-8


def whiten(x: PerToken, *, shift_mean: bool) -> PerToken:
    """Return x at unit variance: around 0, or around its own mean.

        y = (x - mean) / sqrt(var + 1e-8)            shift_mean=True
        y = (x - mean) / sqrt(var + 1e-8) + mean     shift_mean=False: scale only, and the mean put back

    Both statistics run over all of x, which must hold the tokens of the whole iteration and nothing else. The variance
    is that of the population (divided by n).

    Args:
        x: [N], any unit.
        shift_mean: Whether the mean is removed.

    Returns:
        [N], float64; a new array. Equal values, of which a single one is a case, come out as exactly 0 (or as their
        mean); a single one is also worth a warning. Empty in, empty out.

    Raises:
        NumericError: If x holds a NaN or an infinity, which would spread to all of it.

    Source: openai/lm-human-preferences, utils/core.py `whiten`; the mean put back for shift_mean=False is theirs and
    TRL's. verl divides by n - 1.
    """
    if x.size == 0:
        return np.empty(0, np.float64)
    if x.size == 1:
        logger.warning("whitening a single token: its variance is 0, so the result says nothing about it")
    mean = float(np.mean(x, dtype=np.float64))
    if not np.isfinite(mean):
        bad = int(np.argmin(np.isfinite(x)))
        raise NumericError(f"whiten: expected finite numbers, found {x[bad]} at index {bad} of {x.size}")
    # The rounded mean of n equal numbers need not be that number, and sqrt(1e-8) would magnify the difference.
    centred = np.subtract(x, mean, dtype=np.float64) if x.min() != x.max() else np.zeros(x.size)
    white: PerToken = centred / np.sqrt(np.mean(centred * centred) + EPSILON)
    return white if shift_mean else white + mean
