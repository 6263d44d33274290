"""Count, mean and spread of tokens that are never all in memory: of each row first, then joined in the rows' order.

A row is summed up by itself, and rows are added one after the other, so no number depends on how the rows were cut into
shards.
"""

from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import numba
import numpy as np

from rlhf_core.algorithms.ragged import Lengths, Offsets, PerRow, PerToken, check_offsets


class RowMoments(NamedTuple):
    """Of each row that has tokens, [R]: how many, their mean, and the sum of squared deviations from it."""

    counts: Lengths
    means: PerRow
    m2: PerRow


@dataclass(frozen=True)
class Summary:
    """Of all rows so far. Nothing is lost where the spread is small beside the mean: sums run over x - pivot.

    Attributes:
        count: Tokens, n.
        pivot: Mean of the first row.
        shifted: Sum of x - pivot.
        squares: Sum of (x - pivot)^2.
    """

    count: int
    pivot: float
    shifted: float
    squares: float

    @property
    def mean(self) -> float:
        """Their mean; 0.0 for no tokens."""
        return self.pivot + self.shifted / self.count if self.count else 0.0

    @property
    def m2(self) -> float:
        """Sum of squared deviations from the mean; exactly 0 for equal numbers."""
        return max(self.squares - self.shifted * self.shifted / self.count, 0.0) if self.count else 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the population; 0.0 for no tokens."""
        return float(np.sqrt(self.m2 / self.count)) if self.count else 0.0

    def joined(self, rows: RowMoments) -> "Summary":
        """Return the summary of these rows and the ones before them."""
        if rows.counts.size == 0:
            return self
        pivot = self.pivot if self.count else float(rows.means[0])
        with np.errstate(invalid="ignore"):  # infinity less infinity: whoever needs finite numbers says so
            away = rows.means - pivot
            return Summary(
                count=self.count + int(rows.counts.sum()),
                pivot=pivot,
                shifted=_running_sum(self.shifted, rows.counts * away),
                squares=_running_sum(self.squares, rows.m2 + rows.counts * away * away),
            )


EMPTY = Summary(count=0, pivot=0.0, shifted=0.0, squares=0.0)


def row_moments(x: PerToken, offsets: Offsets) -> RowMoments:
    """Return the moments of each row that has tokens, in float64.

    With d = x - first token of the row, which keeps small spreads on large means:
        mean = first + sum d / n        m2 = sum d^2 - (sum d)^2 / n

    Args:
        x: [N], any unit. Not finite in, not finite out.
        offsets: [B + 1], int64, rows of x.

    Raises:
        RowMismatch: If offsets do not fit x.
    """
    check_offsets(offsets, tokens=x.size)
    return RowMoments(*_row_moments(np.ascontiguousarray(x), offsets))


def summary(x: PerToken) -> Summary:
    """Return the summary of numbers as one row."""
    return EMPTY.joined(row_moments(x, np.array([0, x.size], np.int64)))


def _running_sum(start: float, values: PerRow) -> float:
    """Add values to a sum one after the other, so that where a shard ends changes nothing."""
    return float(np.cumsum(np.concatenate([[start], values]))[-1])


@numba.njit(cache=True, nogil=True)
@no_type_check
def _row_moments(x, offsets):
    rows = np.flatnonzero(offsets[1:] > offsets[:-1])
    counts, means, m2 = np.empty(rows.size, np.int64), np.empty(rows.size), np.empty(rows.size)
    for place in range(rows.size):
        start, stop = offsets[rows[place]], offsets[rows[place] + 1]
        first = np.float64(x[start])
        total = squares = 0.0
        for t in range(start, stop):
            d = x[t] - first
            total += d
            squares += d * d
        n = stop - start
        counts[place], means[place], m2[place] = n, first + total / n, max(squares - total * total / n, 0.0)
    return counts, means, m2
