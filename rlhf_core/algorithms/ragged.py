"""Ragged data: the values of all rows in one flat array, and where each row begins and ends.

Row i of `values` [N] is values[offsets[i]:offsets[i + 1]], with offsets [B + 1] int64, offsets[0] = 0 and
offsets[B] = N. There is no padding, so there is no mask to forget; a row of length 0 is legal.
Left out: reading and writing such data, and the check that its numbers are finite (rlhf_core/artifacts/shards.py).
"""

import numpy as np
from jaxtyping import Bool, Float, Int64

from rlhf_core.errors import RowMismatch

# What signatures say. `tokens` and `rows` must agree between the arguments of one call; tests check it at run time.
PerToken = Float[np.ndarray, "tokens"]
PerRow = Float[np.ndarray, "rows"]
RowFlags = Bool[np.ndarray, "rows"]
Offsets = Int64[np.ndarray, "bounds"]  # [B + 1]
Lengths = Int64[np.ndarray, "rows"]
Groups = Int64[np.ndarray, "rows"]  # any number per row; equal numbers make a group
PerSlottedToken = Float[np.ndarray, "slotted"]  # tokens, and the slots of with_slots
PerSlot = Float[np.ndarray, "slots"]


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


def slotted_offsets(offsets: Offsets, slots: RowFlags) -> Offsets:
    """Return the offsets of rows of which some are one value longer.

    Args:
        offsets: [B + 1], int64.
        slots: [B], True for the rows that have a slot after their last token.

    Returns:
        [B + 1], int64.
    """
    return offsets + np.concatenate([np.zeros(1, np.int64), np.cumsum(slots, dtype=np.int64)])


def with_slots(values: PerToken, fill: PerRow, offsets: Offsets, slots: RowFlags) -> PerSlottedToken:
    """Return the values with one more behind the last one of each row that has a slot.

    Args:
        values: [N], any unit.
        fill: [B], what stands in the slots; of other rows it is not read.
        offsets: [B + 1], int64, of values.
        slots: [B], True for the rows that have a slot.

    Returns:
        [N + number of slots]; without any slot, the values themselves.

    Raises:
        RowMismatch: If offsets do not fit.
    """
    check_offsets(offsets, tokens=values.size, rows=fill.size)
    if not slots.any():
        return values
    return np.insert(values, offsets[1:][slots], fill[slots])


def without_slots(values: PerSlottedToken, offsets: Offsets, slots: RowFlags) -> tuple[PerToken, PerSlot]:
    """Return the values of the tokens, and those of the slots: the inverse of with_slots.

    Args:
        values: [N + number of slots].
        offsets: [B + 1], int64, of the tokens without slots.
        slots: [B], True for the rows that have a slot.

    Returns:
        [N] and [number of slots], in the order of the rows; without any slot, the values themselves and nothing.

    Raises:
        RowMismatch: If offsets do not fit.
    """
    bounds = slotted_offsets(offsets, slots)
    check_offsets(bounds, tokens=values.size)
    if not slots.any():
        return values, values[:0]
    at = bounds[1:][slots] - 1
    return np.delete(values, at), values[at]
