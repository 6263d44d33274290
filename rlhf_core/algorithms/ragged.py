"""Ragged data: the values of all rows in one flat array, and where each row begins and ends.

Row i of `values` [N] is values[offsets[i]:offsets[i + 1]], with offsets [B + 1] int64, offsets[0] = 0 and
offsets[B] = N. There is no padding, so there is no mask to forget; a row of length 0 is legal.
Left out: reading and writing such data (rlhf_core/artifacts/shards.py).
"""

from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float, Int64

from rlhf_core.errors import NumericError, RowMismatch

# What signatures say. `tokens` and `rows` must agree between the arguments of one call; tests check it at run time.
PerToken = Float[np.ndarray, "tokens"]
PerRow = Float[np.ndarray, "rows"]
RowFlags = Bool[np.ndarray, "rows"]
Offsets = Int64[np.ndarray, "bounds"]  # [B + 1]
Lengths = Int64[np.ndarray, "rows"]


class RowNames(Protocol):
    """What names rows in error messages: a list of sample ids, or an Arrow column of them."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the name of row `index`; it is printed with str()."""


def lengths(offsets: Offsets) -> Lengths:
    """Return the number of tokens of each row: offsets[i + 1] - offsets[i].

    Args:
        offsets: [B + 1], int64.

    Returns:
        [B], int64, tokens.
    """
    return np.diff(offsets)


def check_offsets(offsets: Offsets, *, tokens: int, rows: int | None = None) -> None:
    """Check that offsets cut exactly `tokens` values into rows, before a kernel trusts them as memory addresses.

    Args:
        offsets: [B + 1], int64.
        tokens: N, the length of the flat array that they cut.
        rows: B, where a per-row array tells; None = any.

    Raises:
        RowMismatch: If they do not begin at 0, end at N, rise, or make B rows.
    """
    if offsets.size == 0 or offsets[0] != 0 or offsets[-1] != tokens:
        ends = f"{offsets[0]} to {offsets[-1]}" if offsets.size else "nothing"
        raise RowMismatch(f"offsets: expected to run from 0 to the {tokens} flat values, found {ends}")
    if np.any(offsets[1:] < offsets[:-1]):
        row = int(np.argmax(offsets[1:] < offsets[:-1]))
        raise RowMismatch(f"offsets: row {row} has the negative length {offsets[row + 1] - offsets[row]}")
    if rows is not None and offsets.size != rows + 1:
        raise RowMismatch(f"offsets: expected {rows + 1} for {rows} rows, found {offsets.size}")


def check_same_size(**arrays: np.ndarray) -> None:
    """Check that arrays which belong together token by token (or row by row) have one length.

    Args:
        arrays: One-dimensional arrays by name.

    Raises:
        RowMismatch: With the name and length of each, if they differ.
    """
    if len({array.size for array in arrays.values()}) > 1:
        found = ", ".join(f"{name} {array.size}" for name, array in arrays.items())
        raise RowMismatch(f"expected arrays of one length, found {found}")


def require_finite(name: str, array: np.ndarray, offsets: Offsets | None, row_names: RowNames) -> None:
    """Stop at the first NaN or infinity: one such number would spread to every token through whitening.

    Args:
        name: What the numbers are, such as "data/scores/iteration=1: logprobs".
        array: [N] with offsets, or [B] without.
        offsets: [B + 1], int64; None when the array holds one number per row.
        row_names: [B], the names of the rows, for the message.

    Raises:
        NumericError: With the name, the row's index and name, the token's index within the row, and the number found.
    """
    finite = np.isfinite(array)
    if finite.all():
        return
    bad = int(np.argmin(finite))
    row, token = bad, ""
    if offsets is not None:
        row = int(np.searchsorted(offsets, bad, side="right")) - 1
        token = f", token {bad - int(offsets[row])}"
    raise NumericError(
        f"{name}: expected finite numbers, found {array[bad]} in row {row} ({row_names[row]}){token};"
        f" {int((~finite).sum())} of {array.size} numbers are not finite. Repair what wrote them and run it again"
    )
