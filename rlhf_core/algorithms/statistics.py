"""Means and related figures of ragged data, for metric files: always finite, and never counting an empty response."""

from collections.abc import Sequence

import numpy as np

from rlhf_core.algorithms.ragged import Offsets, PerRow, PerToken, check_offsets, check_same_size, lengths

_BLOCK = 1_000_000  # drawn numbers of a bootstrap that are held at once: 8 MiB


def mean_and_std(x: PerToken) -> tuple[float, float]:
    """Return the mean and the population standard deviation, summed in float64.

    Args:
        x: [N], any unit, tokens or rows.

    Returns:
        Mean and standard deviation in the unit of x; (0.0, 0.0) for no numbers.
    """
    if x.size == 0:
        return 0.0, 0.0
    return float(np.mean(x, dtype=np.float64)), float(np.std(x, dtype=np.float64))


def token_mean(x: PerToken) -> float:
    """Return the mean over all tokens: a long response weighs more than a short one.

    Args:
        x: [N], any unit.

    Returns:
        The mean in the unit of x; 0.0 for no tokens.
    """
    return float(np.mean(x, dtype=np.float64)) if x.size else 0.0


def sequence_sums(x: PerToken, offsets: Offsets) -> PerRow:
    """Return the sum of each row, in float64.

    Args:
        x: [N], any unit.
        offsets: [B + 1], int64.

    Returns:
        [B], float64, in the unit of x; 0 for a row without tokens.

    Raises:
        RowMismatch: If offsets do not fit x.
    """
    check_offsets(offsets, tokens=x.size)
    filled = lengths(offsets) > 0
    sums = np.zeros(filled.size)
    if x.size:
        # Each sum runs to the next start, so starts of rows without tokens must be left out.
        sums[filled] = np.add.reduceat(x, offsets[:-1][filled], dtype=np.float64)
    return sums


def sequence_mean(x: PerToken, offsets: Offsets) -> float:
    """Return the mean over responses of the sum over a response's tokens.

    This is the form of objective/kl and objective/entropy: long responses have larger sums.

    Args:
        x: [N], any unit.
        offsets: [B + 1], int64. Rows without tokens are not counted.

    Returns:
        The mean in the unit of x; 0.0 if no row has tokens.

    Raises:
        RowMismatch: If offsets do not fit x.
    """
    return token_mean(sequence_sums(x, offsets)[lengths(offsets) > 0])


def explained_variance(values: PerToken, returns: PerToken) -> float:
    """Return the share of the variance of the returns that the values predict.

        1 - var(returns - values) / var(returns)

    Args:
        values: [N], reward units.
        returns: [N], reward units.

    Returns:
        At most 1; 0 for values that are constant; below 0 for values worse than that. 0.0 where it is not defined:
        no tokens, or returns that are all equal.

    Raises:
        RowMismatch: If the lengths differ.
    """
    check_same_size(values=values, returns=returns)
    if returns.size == 0 or returns.min() == returns.max():
        return 0.0
    residual = np.subtract(returns, values, dtype=np.float64)
    return float(1.0 - residual.var() / np.var(returns, dtype=np.float64))


def pair_statistics(chosen: PerRow, rejected: PerRow) -> dict[str, float]:
    """Return how often, and by how much, the preferred response scores higher.

    Args:
        chosen: [B], reward units, scores of the preferred responses.
        rejected: [B], reward units, scores of the others.

    Returns:
        accuracy: share with chosen > rejected; a tie is no win. accuracy_ties_half: the same, a tie counted as half a
        win. ties: how many. margin_mean: mean of chosen - rejected, reward units. All 0 for no pairs.

    Raises:
        RowMismatch: If the lengths differ.
    """
    check_same_size(chosen=chosen, rejected=rejected)
    margin = np.subtract(chosen, rejected, dtype=np.float64)
    wins, ties = token_mean((margin > 0).astype(np.float64)), token_mean((margin == 0).astype(np.float64))
    return {
        "accuracy": wins,
        "accuracy_ties_half": wins + ties / 2,
        "ties": float((margin == 0).sum()),
        "margin_mean": token_mean(margin),
    }


def clustered_interval(
    x: PerRow, clusters: Sequence[str], *, seed: int, resamples: int, confidence: float
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean over rows that are not independent of each other.

    Whole clusters are resampled with replacement, with all of their rows:

        mean = sum over drawn clusters of sum x / sum over drawn clusters of rows

    Args:
        x: [B], any unit.
        clusters: [B], what a row belongs to, such as its prompt.
        seed: Of the resampling.
        resamples: How many means the interval is taken from.
        confidence: Share of them inside the interval.

    Returns:
        Low and high, in the unit of x; (0.0, 0.0) for no rows.

    Raises:
        RowMismatch: If the lengths differ.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (percentile interval); Davison and
    Hinkley 1997, Bootstrap Methods and their Application, section 3.8 (clusters).
    """
    names, places = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    check_same_size(x=x, clusters=places)
    if x.size == 0:
        return 0.0, 0.0
    sums = np.bincount(places, weights=x, minlength=len(names))
    rows = np.bincount(places, minlength=len(names))
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK // len(names))
    means = []
    for start in range(0, resamples, block):
        drawn = generator.integers(0, len(names), size=(min(block, resamples - start), len(names)))
        means.append(sums[drawn].sum(axis=1) / rows[drawn].sum(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)
