"""Random ragged batches: rows of any length, 0 included, as a model could have written them."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st


class Batch(NamedTuple):
    """Rows as lists, so that a test lays them out by itself: flat, padded, reordered or split."""

    logprobs: list[list[float]]
    ref_logprobs: list[list[float]]
    values: list[list[float]]
    rewards: list[list[float]]
    scores: list[float]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.values]


def flat(rows: list[list[float]]) -> np.ndarray:
    """All rows behind each other, float64."""
    return np.array([value for row in rows for value in row], np.float64)


def offsets(rows: list[list[float]]) -> np.ndarray:
    """Where each row begins and ends in flat(rows)."""
    return np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Finite numbers of a size that occurs, exact in float32."""
    return st.floats(low, high, width=32, allow_nan=False)


unit = st.floats(0, 1)


@st.composite
def batches(draw: st.DrawFn, *, min_rows: int = 0) -> Batch:
    """Up to 6 rows of 0 to 7 tokens."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=min_rows, max_size=6))

    def rows(low: float, high: float) -> list[list[float]]:
        return [draw(st.lists(numbers(low, high), min_size=n, max_size=n)) for n in lengths]

    scores = draw(st.lists(numbers(-10, 10), min_size=len(lengths), max_size=len(lengths)))
    return Batch(rows(-20, 0), rows(-20, 0), rows(-5, 5), rows(-5, 5), scores)
