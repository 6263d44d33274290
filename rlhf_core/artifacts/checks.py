"""What every row of every artifact must satisfy, checked when it is written and again when it is read."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.artifacts.schema import ALIGNED, NULLABLE
from rlhf_core.errors import NumericError, RowMismatch


def check_rows(table: pa.Table, key: str, path: Path) -> None:
    """Refuse nulls, floats that are not finite, repeated keys, and response-aligned lists of different lengths.

    Args:
        table: Rows with some or all columns of an artifact.
        key: Name of the artifact's row key; it need not be among the columns.
        path: Where the rows come from or go to, for messages.

    Raises:
        RowMismatch: If a value or list item is null outside schema.NULLABLE, a key occurs twice, or a list's length
            differs from that of response_ids.
        NumericError: If a float is NaN or infinite. Each message names file, row and column.
    """
    for name in table.column_names:
        start = 0
        for chunk in table.column(name).chunks:
            _check_chunk(table, name, chunk, start, path)
            start += len(chunk)
    if key in table.column_names:
        check_unique(table.column(key), key, path)
    if "response_ids" in table.column_names:
        _check_aligned(table, path)


def check_unique(column: pa.ChunkedArray, key: str, path: Path) -> None:
    """Refuse a row key that occurs twice.

    Raises:
        RowMismatch: With the first such key.
    """
    counts = pc.value_counts(column)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        first = repeated[0].as_py()
        times = f"{first['counts']} times ({len(repeated)} such keys)"
        raise RowMismatch(f"{path}: {key} {first['values']!r} occurs {times}; every row needs its own")


def list_lengths(column: pa.ChunkedArray) -> np.ndarray:
    """Return the number of items of each list, [B] int64; a null list has none."""
    chunks = [pc.fill_null(pc.list_value_length(chunk), 0) for chunk in column.chunks]
    return np.concatenate([np.empty(0, np.int64), *(chunk.to_numpy(zero_copy_only=False) for chunk in chunks)])


def row_name(table: pa.Table, index: int) -> str:
    """Return a row's number and key, for messages."""
    for key in ("sample_id", "pair_id", "prompt_id"):
        if key in table.column_names:
            return f"row {index} ({key} {table.column(key)[index].as_py()!r})"
    return f"row {index}"


def _check_chunk(table: pa.Table, name: str, chunk: pa.Array, start: int, path: Path) -> None:
    """Check one chunk of one column; its first row is row `start` of the table."""
    if name not in NULLABLE and (bad := _first_null(chunk)) is not None:
        where = f"{path}: {row_name(table, start + bad)}, column {name}"
        raise RowMismatch(f"{where}: expected a value, found a null (unknown is not a number, and empty is [])")
    is_list = pa.types.is_list(chunk.type)
    items = chunk.flatten() if is_list else chunk
    if not pa.types.is_floating(items.type):
        return
    if items.null_count:
        items = pc.fill_null(items, 0.0)  # where nulls are allowed
    numbers = items.to_numpy()
    with np.errstate(all="ignore"):
        if np.isfinite(numbers.sum()):  # so all of them are; finite numbers whose sum is not are looked at one by one
            return
    finite = np.isfinite(numbers)
    if finite.all():
        return
    item = int(np.argmin(finite))
    row, position = _locate(chunk, item) if is_list else (item, 0)
    where = f"{path}: {row_name(table, start + row)}, column {name}" + (f", position {position}" if is_list else "")
    raise NumericError(
        f"{where}: expected a finite number, found {items[item].as_py()}; the stage that made it diverged"
    )


def _first_null(chunk: pa.Array) -> int | None:
    """The first row that is null or holds a null, at any depth."""
    if chunk.null_count:
        return int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
    if pa.types.is_list(chunk.type) and (item := _first_null(chunk.flatten())) is not None:
        return _locate(chunk, item)[0]
    return None


def _locate(chunk: pa.Array, item: int) -> tuple[int, int]:
    """The row and the position within it of an item of chunk.flatten()."""
    ends = np.cumsum(list_lengths(pa.chunked_array([chunk])))
    row = int(np.searchsorted(ends, item, side="right"))
    return row, item - (int(ends[row - 1]) if row else 0)


def _check_aligned(table: pa.Table, path: Path) -> None:
    expected = list_lengths(table.column("response_ids"))
    for name in ALIGNED:
        if name not in table.column_names:
            continue
        found = list_lengths(table.column(name))
        bad = np.flatnonzero(found != expected)
        if len(bad):
            row = int(bad[0])
            where = f"{path}: {row_name(table, row)}, column {name}"
            raise RowMismatch(f"{where}: {found[row]} values for {expected[row]} response_ids ({len(bad)} such rows)")
