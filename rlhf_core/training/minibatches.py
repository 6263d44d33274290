"""In which order training walks through its rows."""

from collections.abc import Iterator

import numpy as np


def minibatches(rows: int, *, epochs: int, minibatch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield minibatches of row indices: each epoch visits every row once, in its own seeded order.

    Args:
        rows: Number of responses, or of pairs.
        epochs: Passes over them.
        minibatch_size: Rows; the last of an epoch is smaller where they do not divide.
        seed: The whole order is a function of it.
    """
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        order = generator.permutation(rows).tolist()
        for start in range(0, rows, minibatch_size):
            yield sorted(order[start : start + minibatch_size])  # a sum's rounding then depends on the set alone
