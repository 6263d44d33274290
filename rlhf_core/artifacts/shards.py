"""Sharded Parquet: the only reader and writer of our artifacts.

A directory holds part-00000.parquet, part-00001.parquet, ... A shard is written under a hidden name, synced and
renamed, so a visible shard is a whole one; its bytes are a pure function of table, schema and metadata. What a file
relies on is in its footer, as JSON under the key "rlhf". Row groups stay below the 2**31 items that an Arrow list
column can address.
Not here: which columns exist (schema.py), what a row must satisfy (checks.py), partial work and resume (stage.py).
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.artifacts.checks import check_rows, check_unique, list_lengths, row_name
from rlhf_core.artifacts.schema import ALIGNED, SCHEMA_VERSION, declared_types
from rlhf_core.disk import writing
from rlhf_core.errors import ArtifactError, RowMismatch, SchemaMismatch
from rlhf_core.stage import fsync_directory

# List items allowed in one column of one row group: what the int32 offsets of an Arrow list can address.
MAX_LIST_ITEMS = 2**31 - 1

_METADATA_KEY = b"rlhf"
_SHARD = re.compile(r"part-(\d{5,})\.parquet")
_MAGIC = b"PAR1"
_RERUN = "; delete it and run `dvc repro` for the stage that writes it"


def shard_name(index: int) -> str:
    """Return the file name of a shard, such as part-00000.parquet."""
    return f"part-{index:05d}.parquet"


def shard_paths(directory: Path) -> list[Path]:
    """Return the shards of an artifact in order, after a cheap look (size and magic bytes) at each.

    Hidden files (unfinished writes) are ignored.

    Args:
        directory: Directory of one artifact.

    Returns:
        At least one path, sorted by shard number.

    Raises:
        ArtifactError: If the directory is missing or empty, holds a file that is no shard, lacks a shard in between, or
            a shard is empty or truncated; the message names the file.
    """
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory; run `dvc repro` for the stage that writes it")
    visible = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    for path in visible:
        if not _SHARD.fullmatch(path.name) or not path.is_file():
            raise ArtifactError(
                f"{path}: expected only {shard_name(0)}, {shard_name(1)}, ... in this directory; move it away"
            )
    paths = sorted(visible, key=lambda path: int(path.stem.removeprefix("part-")))
    if not paths:
        raise ArtifactError(f"{directory}: holds no shard; run `dvc repro` for the stage that writes it")
    for index, path in enumerate(paths):
        if path.name != shard_name(index):
            raise ArtifactError(f"{directory / shard_name(index)}: missing, though {path.name} is there{_RERUN}")
        _check_whole(path)
    return paths


def remove_unfinished(directory: Path) -> list[str]:
    """Delete the hidden files that interrupted writes left in a directory and return their names."""
    leftovers = sorted(path for path in directory.glob(".part-*.tmp"))
    for path in leftovers:
        path.unlink()
    return [path.name for path in leftovers]


def write_shard(path: Path, table: pa.Table, schema: pa.Schema, metadata: dict[str, Any]) -> None:
    """Check a table and write it as one shard: whole or not at all, the same bytes for the same content.

    Args:
        path: Target, named by shard_name; its directory is made when missing.
        table: Rows; columns in any order, exactly those of the schema. Types may differ where no value changes its
            meaning (int64 for int32, float64 for float32, an all-empty list of unknown type); zero rows are legal.
        schema: Columns, order and types on disk. Its first column is the row key.
        metadata: JSON values for the footer; "schema_version" is added.

    Raises:
        SchemaMismatch: If columns are missing or unknown, or a type does not fit.
        RowMismatch: If keys repeat, a value is null, or response-aligned lists differ in length.
        NumericError: If a float is NaN or infinite.
    """
    table = _conform(table, schema, path)
    check_rows(table, schema.names[0], path)
    text = json.dumps(
        {**metadata, "schema_version": SCHEMA_VERSION}, sort_keys=True, allow_nan=False, ensure_ascii=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(temporary, needed=table.nbytes), temporary.open("wb") as handle:
        described = table.schema.with_metadata({_METADATA_KEY: text.encode()})
        with pq.ParquetWriter(handle, described, **encoding(table.schema)) as writer:
            for start, stop in _row_groups(table, path):
                writer.write_table(table.slice(start, stop - start), row_group_size=max(stop - start, 1))
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


def encoding(schema: pa.Schema) -> dict[str, Any]:
    """Return how columns are written: lists of numbers split by byte, with neither dictionary nor statistics.

    Numbers of tokens hardly recur, and no query skips tokens by their range. This takes half the time of pyarrow's
    default encoding, and a sixth off the size (docs/performance.md).
    """
    numbers, others = [], []
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
        if is_number and path != field.name:
            numbers.append(path)
        elif pa.types.is_struct(kind):
            others += [f"{path}.{child.name}" for child in kind]
        else:
            others.append(path)
    return {
        "compression": "zstd",
        "use_dictionary": others,
        "use_byte_stream_split": numbers,
        "write_statistics": others,
        "write_page_checksum": True,
    }


def read_metadata(directory: Path) -> dict[str, Any]:
    """Return the metadata that all shards of an artifact share.

    Raises:
        ArtifactError: If a shard cannot be read, is not ours, has another schema version, or disagrees with the first.
    """
    paths = shard_paths(directory)
    first = shard_metadata(paths[0])
    for path in paths[1:]:
        other = shard_metadata(path)
        if other != first:
            keys = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
            found = f"its metadata differs from {paths[0].name}'s in {', '.join(keys)}"
            raise ArtifactError(f"{path}: {found}: these are shards of two runs{_RERUN}")
    return first


def shard_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of one shard.

    Raises:
        ArtifactError: If it cannot be read, is not ours, or has another schema version.
    """
    _check_whole(path)
    file, metadata = _open(path)
    file.close()
    return metadata


def column_names(directory: Path) -> list[str]:
    """Return the columns of an artifact, in order, from the footer of its first shard.

    Raises:
        ArtifactError: As shard_paths, or when the shard cannot be read.
    """
    file, _ = _open(shard_paths(directory)[0])
    file.close()
    return list(file.schema_arrow.names)


def row_counts(directory: Path) -> list[int]:
    """Return the number of rows of each shard, from their footers.

    Raises:
        ArtifactError: As shard_paths, or when a shard cannot be read.
    """
    counts = []
    for path in shard_paths(directory):
        file, _ = _open(path)
        counts.append(int(file.metadata.num_rows))
        file.close()
    return counts


def iter_tables(directory: Path, columns: list[str] | None = None) -> Iterator[tuple[str, pa.Table]]:
    """Yield (shard name, table) in the order of the shards; one shard is in memory at a time.

    A table has one chunk per row group, so no list array passes MAX_LIST_ITEMS.

    Args:
        directory: Directory of one artifact.
        columns: Columns to read, in this order; None = all.

    Raises:
        ArtifactError: As shard_paths; SchemaMismatch for another schema version, missing columns or wrong types;
            RowMismatch and NumericError as write_shard.
    """
    for path in shard_paths(directory):
        yield path.name, read_shard(path, columns)


def read_table(directory: Path, columns: list[str] | None = None) -> pa.Table:
    """Return all shards as one table in the order of the shards, without joining their chunks.

    Args:
        directory: Directory of one artifact.
        columns: Columns to read, in this order; None = all.

    Raises:
        ArtifactError: As iter_tables; RowMismatch also when a row key occurs in two shards.
    """
    paths = shard_paths(directory)
    table = pa.concat_tables([read_shard(path, columns) for path in paths])
    key = _open(paths[0])[0].schema_arrow.names[0]
    if key in table.column_names:
        check_unique(table.column(key), key, directory)
    return table


def read_shard(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return one shard, read row group by row group and checked like what is written.

    Args:
        path: The Parquet file.
        columns: Columns to read, in this order; None = all.

    Raises:
        ArtifactError: As iter_tables.
    """
    _check_whole(path)
    file, _ = _open(path)
    names = file.schema_arrow.names
    missing = [name for name in columns or [] if name not in names]
    if missing:
        raise SchemaMismatch(f"{path}: missing column {', '.join(missing)}; it has {', '.join(names)}{_RERUN}")
    for name, expected in declared_types(names).items():
        found = file.schema_arrow.field(name).type
        if found != expected and (columns is None or name in columns):
            raise SchemaMismatch(f"{path}: column {name} is {found}; expected {expected}{_RERUN}")
    wanted = list(names if columns is None else columns)
    # The key names rows in messages, and response_ids has the length that aligned lists must have.
    needed = [names[0], *(["response_ids"] if any(name in ALIGNED for name in wanted) else [])]
    extra = [name for name in needed if name in names and name not in wanted]
    try:
        groups = [file.read_row_group(index, columns=wanted + extra) for index in range(file.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path}: damaged: {error}{_RERUN}") from None
    finally:
        file.close()
    if not groups:
        groups = [pa.schema([file.schema_arrow.field(name) for name in wanted + extra]).empty_table()]
    table = pa.concat_tables([group.select(wanted + extra).replace_schema_metadata() for group in groups])
    check_rows(table, names[0], path)
    return table.select(wanted)


def ragged(column: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of a list column as one flat array with row offsets.

    Args:
        column: Lists of numbers, [B] rows; slices and several chunks are fine.

    Returns:
        (values, offsets): values [N] in the item's dtype, a writable copy; offsets [B + 1] int64 with offsets[0] = 0:
        row i is values[offsets[i]:offsets[i + 1]].

    Raises:
        SchemaMismatch: If the column does not hold lists.
        RowMismatch: If a list or an item is null.
    """
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        raise SchemaMismatch(f"expected a column of lists, found {column.type}")
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    values = [np.empty(0, dtype=column.type.value_type.to_pandas_dtype())]
    lengths = [np.zeros(1, dtype=np.int64)]
    for chunk in chunks:
        items = chunk.flatten()
        if chunk.null_count or items.null_count:
            raise RowMismatch("expected a list of numbers in every row, found a null")
        values.append(items.to_numpy(zero_copy_only=False))
        lengths.append(np.diff(chunk.offsets.to_numpy(zero_copy_only=False)).astype(np.int64))
    return np.concatenate(values), np.cumsum(np.concatenate(lengths), dtype=np.int64)


def ragged_array(values: np.ndarray, offsets: np.ndarray, value_type: pa.DataType) -> pa.ListArray:
    """Return flat items with row offsets as an Arrow list array; the inverse of ragged.

    Args:
        values: [N] numbers.
        offsets: [B + 1] int64 with offsets[0] = 0 and offsets[B] = N, not decreasing.
        value_type: Arrow type of an item.

    Raises:
        RowMismatch: If the offsets do not fit the values.
        ArtifactError: If there are more than MAX_LIST_ITEMS items; build the column in several chunks then.
    """
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(values) or np.any(np.diff(offsets) < 0):
        found = f"{offsets[0]} to {offsets[-1]}" if len(offsets) else "none"
        raise RowMismatch(f"offsets must rise from 0 to the {len(values)} values; found {found}")
    if len(values) > MAX_LIST_ITEMS:
        raise ArtifactError(f"{len(values)} items in one list array; at most {MAX_LIST_ITEMS} fit: use smaller shards")
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, value_type))


def _check_whole(path: Path) -> None:
    """Refuse an empty or truncated file by its size and its magic bytes, without parsing it."""
    size = path.stat().st_size if path.is_file() else -1
    if size < 0:
        raise ArtifactError(f"{path}: no such file{_RERUN}")
    if size == 0:
        raise ArtifactError(f"{path}: 0 bytes, its write was interrupted{_RERUN}")
    with path.open("rb") as handle:
        head = handle.read(4)
        handle.seek(max(0, size - 8))
        tail = handle.read()
    if head != _MAGIC:
        raise ArtifactError(f"{path}: not a Parquet file{_RERUN}")
    # The last 8 bytes: length of the footer, then the magic again.
    if size < 12 or tail[4:] != _MAGIC or int.from_bytes(tail[:4], "little") + 12 > size:
        raise ArtifactError(f"{path}: truncated ({size} bytes, no Parquet footer at its end){_RERUN}")


def _open(path: Path) -> tuple[pq.ParquetFile, dict[str, Any]]:
    """Parse the footer: the file, and our metadata in it."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        file.schema_arrow.names  # noqa: B018  (decodes them)
        text = (file.schema_arrow.metadata or {}).get(_METADATA_KEY)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise ArtifactError(f"{path}: damaged: {error}{_RERUN}") from None
    if text is None:
        raise SchemaMismatch(
            f"{path}: a Parquet file without our metadata: no stage of this project wrote it; move it away"
        )
    try:
        metadata: dict[str, Any] = json.loads(text)
        version = metadata.get("schema_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged: our metadata in its footer cannot be read ({error}){_RERUN}") from None
    if version != SCHEMA_VERSION:
        raise SchemaMismatch(f"{path}: schema version {version}; this code reads version {SCHEMA_VERSION}{_RERUN}")
    return file, metadata


def _conform(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    """Order and cast the columns to exactly the schema."""
    missing = [name for name in schema.names if name not in table.column_names]
    unknown = [name for name in table.column_names if name not in schema.names]
    if missing or unknown or table.num_columns != len(schema):
        found = f"missing {', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}"
        raise SchemaMismatch(f"{path}: columns differ from the schema: {found}; expected {', '.join(schema.names)}")
    columns = []
    for field in schema:
        column = table.column(field.name)
        try:
            if not _fits(column.type, field.type):
                raise pa.ArrowInvalid("values would change their meaning")
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise SchemaMismatch(
                f"{path}: column {field.name} is {column.type}; expected {field.type} ({error})"
            ) from None
    return pa.table(columns, schema=schema.remove_metadata())


def _fits(found: pa.DataType, expected: pa.DataType) -> bool:
    """Whether a cast keeps what a value is: Arrow itself would also turn text into numbers."""
    if pa.types.is_null(found):
        return True
    if pa.types.is_list(expected) or pa.types.is_large_list(expected):
        return (pa.types.is_list(found) or pa.types.is_large_list(found)) and _fits(
            found.value_type, expected.value_type
        )
    if pa.types.is_floating(expected):
        return bool(pa.types.is_floating(found) or pa.types.is_integer(found))
    if pa.types.is_integer(expected):
        return bool(pa.types.is_integer(found))
    if pa.types.is_string(expected):
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_dictionary(found))
    if pa.types.is_struct(expected):
        return bool(pa.types.is_struct(found))
    return bool(found == expected)


def _row_groups(table: pa.Table, path: Path) -> list[tuple[int, int]]:
    """Ranges of rows in which no column has more than MAX_LIST_ITEMS list items; one empty range for an empty table."""
    columns = [table.column(field.name) for field in table.schema if pa.types.is_list(field.type)]
    ends = [np.cumsum(_items_per_row(column)) for column in columns]
    groups = []
    start = 0
    while start < table.num_rows:
        # The column that fills up first decides how many rows follow `start`.
        fits = [np.searchsorted(end, (end[start - 1] if start else 0) + MAX_LIST_ITEMS, side="right") for end in ends]
        stop = int(min(fits, default=table.num_rows))
        if stop == start:
            raise ArtifactError(
                f"{path}: {row_name(table, start)}: a list of more than {MAX_LIST_ITEMS} items cannot be written"
            )
        groups.append((start, stop))
        start = stop
    return groups or [(0, 0)]


def _items_per_row(column: pa.ChunkedArray) -> np.ndarray:
    """List items of each row at the level that has most: of the lists, or of the lists within them."""
    lengths = list_lengths(column)
    if not pa.types.is_list(column.type.value_type):
        return lengths
    inner = list_lengths(pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type))
    ends = np.concatenate([[0], np.cumsum(inner)])
    deepest: np.ndarray = np.maximum(lengths, np.diff(ends[np.concatenate([[0], np.cumsum(lengths)])]))
    return deepest
