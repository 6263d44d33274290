"""Rows of any artifact: find the files, filter, sort, and read only what is shown.

Works in two passes over Parquet batches: first the columns of filter and sort key, which gives row positions (and stops
at the limit when nothing is sorted), then the shown columns of those rows. Memory is that of one batch and the result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.algorithms.statistics import sequence_sums
from rlhf_core.artifacts.schema import ALIGNED
from rlhf_core.artifacts.shards import ragged, shard_paths
from rlhf_core.errors import ArtifactError, ModelError, RlhfError, RowMismatch
from rlhf_core.report.filters import Filter

# Rows decoded at once: with 1,000 tokens a row and nine token columns about 40 MB.
BATCH_ROWS = 1024
ID_COLUMNS = ("sample_id", "pair_id", "prompt_id")
# What each computed column is made of.
DERIVED = {
    "kl": ("logprobs", "ref_logprobs"),
    "response_length": ("response_ids",),
    "num_tokens": ("prompt_ids", "response_ids"),
}


@dataclass(frozen=True, slots=True)
class Source:
    """One Parquet file, and the iteration that its directory names (None outside iteration=K)."""

    path: Path
    iteration: str | None


@dataclass(frozen=True, slots=True)
class SortKey:
    """A column to sort by."""

    column: str
    descending: bool


def sources(path: Path) -> list[Source]:
    """Return the Parquet files of an artifact: a file, a directory of shards, or a parent of iteration=K directories.

    Raises:
        ArtifactError: If there is nothing to read, or a shard is empty or truncated; the message names it.
    """
    if path.is_file():
        return [Source(path, _iteration_of(path.parent))]
    parts = [child for child in path.glob("iteration=*") if child.is_dir()] if path.is_dir() else []
    directories = sorted(parts, key=lambda part: _natural(part.name)) if parts else [path]
    return [Source(shard, _iteration_of(directory)) for directory in directories for shard in shard_paths(directory)]


def column_names(source: Source) -> list[str]:
    """Return the columns of a file, then those that can be computed from them."""
    schema = _open(source.path).schema_arrow
    derived = [
        name
        for name, parts in DERIVED.items()
        if name not in schema.names and all(_is_flat(schema, part) for part in parts)
    ]
    iteration = ["iteration"] if source.iteration is not None and "iteration" not in schema.names else []
    return [*schema.names, *derived, *iteration]


def default_columns(available: Sequence[str], *, several_iterations: bool) -> list[str]:
    """Return what is shown unless asked otherwise: ids, texts, finish, scores, KL and lengths, where they exist."""
    wanted = [
        *(["iteration"] if several_iterations else []),
        *(name for name in ID_COLUMNS if name in available),
        *("split", "finish_reason"),
        *(name for name in available if name in ("score", "reward_model_score") or name.startswith("score_")),
        *("ranks", "margin", "agreement", "kl", "num_tokens", "response_length", "prompt", "response", "responses"),
    ]
    # prompt_id is part of sample_id.
    return [
        name
        for name in dict.fromkeys(wanted)
        if name in available and (name != "prompt_id" or "sample_id" not in available)
    ]


def parse_sort(text: str) -> list[SortKey]:
    """Parse "-score,response_length": a minus sorts from high to low.

    Raises:
        RlhfError: If a name is empty.
    """
    keys = [SortKey(part.strip().removeprefix("-"), part.strip().startswith("-")) for part in text.split(",")]
    if not all(key.column for key in keys):
        raise RlhfError(f"sort {text!r}: expected column names, such as -score or -score,response_length")
    return keys


def select_rows(
    path: Path,
    *,
    columns: Sequence[str],
    where: Filter | None,
    sort: Sequence[SortKey],
    limit: int,
    sample_id: str | None,
) -> pa.Table:
    """Return the first `limit` rows that pass, in sort order or else in file order.

    Args:
        path: What `sources` takes.
        columns: Columns to return, computed ones included.
        where: Keep rows for which this is true; None keeps all.
        sort: Keys, the first the strongest; nulls last, ties in file order.
        limit: Largest number of rows; 0 = all.
        sample_id: Keep only the row with this sample_id, pair_id or prompt_id.

    Raises:
        ArtifactError: If a file is damaged.
        RlhfError: If a column does not exist or cannot be compared or sorted.
    """
    files = sources(path)
    keys = [key.column for key in sort]
    found: list[tuple[int, int]] = []
    sort_values: list[pa.Table] = []
    for index, source in enumerate(files):
        available = column_names(source)
        _require(available, [*columns, *keys, *sorted(where.names if where else ())], source.path)
        identity = next((name for name in ID_COLUMNS if name in available), None)
        needed = list(
            dict.fromkeys(
                [*keys, *sorted(where.names if where else ()), *([identity] if sample_id and identity else [])]
            )
        )
        for start, batch in _batches(source, needed, range(_open(source.path).metadata.num_rows)):
            mask = where.mask(batch) if where else pa.chunked_array([pa.array(np.ones(batch.num_rows, dtype=bool))])
            if sample_id is not None:
                if identity is None:
                    raise RlhfError(f"{source.path}: has none of {', '.join(ID_COLUMNS)}, so no row can be named")
                mask = pc.and_(mask, pc.equal(batch.column(identity), sample_id))
            rows = np.flatnonzero(mask.to_numpy())
            found += [(index, start + int(row)) for row in rows]
            if keys:
                sort_values.append(batch.select(keys).take(pa.array(rows)))
            elif limit and len(found) >= limit:
                return _fetch(files, found[:limit], columns)
    if keys and found:
        found = [found[row] for row in _order(pa.concat_tables(sort_values), sort)]
    return _fetch(files, found[:limit] if limit else found, columns)


def token_columns(available: Sequence[str]) -> list[str]:
    """Return the columns that hold one number for each response token."""
    return [name for name in ALIGNED if name in available]


def token_texts(directory: Path, ids: Sequence[int]) -> list[str]:
    """Return the text of each token by itself.

    A token that is part of a character, or that decodes to nothing, is given as the vocabulary writes it, and an id
    that it lacks (a model's vocabulary may be padded) as a number.

    Args:
        directory: A model directory with tokenizer.json.
        ids: Token ids.

    Raises:
        ModelError: If there is no tokenizer.json.
    """
    from tokenizers import Tokenizer  # only --tokens needs it

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{file}: no such file; name a model directory that has one with --tokenizer")
    tokenizer = Tokenizer.from_file(str(file))
    texts = []
    for token_id in ids:
        token = tokenizer.id_to_token(token_id)
        if token is None:
            texts.append(f"[id {token_id}]")
            continue
        # "▁" marks a leading space, which decoding a single token would lose.
        text = (
            token.replace("▁", " ")
            if token.startswith("▁")
            else tokenizer.decode([token_id], skip_special_tokens=False)
        )
        texts.append(token if not text or "\ufffd" in text else text)
    return texts


def _order(values: pa.Table, sort: Sequence[SortKey]) -> list[int]:
    """Stable order of rows: Arrow's sort is not, so the row number is the last key."""
    for key in sort:
        kind = values.schema.field(key.column).type
        if pa.types.is_nested(kind):
            raise RlhfError(
                f"sort: column {key.column} holds {kind}; sort by a number or text (see kl, response_length)"
            )
    numbered = values.append_column("\0row", pa.array(range(values.num_rows), pa.int64()))
    directions = [(key.column, "descending" if key.descending else "ascending") for key in sort]
    indices: list[int] = pc.sort_indices(numbered, sort_keys=[*directions, ("\0row", "ascending")]).to_pylist()
    return indices


def _fetch(files: Sequence[Source], rows: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
    """Read the named rows of several files and put them in the given order."""
    tables: list[pa.Table] = []
    places: dict[tuple[int, int], int] = {}
    for index in sorted({file for file, _ in rows}):
        wanted = sorted({row for file, row in rows if file == index})
        for start, batch in _batches(files[index], columns, wanted):
            inside = [row - start for row in wanted if start <= row < start + batch.num_rows]
            for row in inside:
                places[index, start + row] = len(places)
            tables.append(batch.take(pa.array(inside, pa.int64())))
    if not tables:
        empty = _columns(_open(files[0].path).schema_arrow.empty_table(), files[0], columns)
        return empty
    joined = pa.concat_tables(tables, promote_options="permissive")
    return joined.take(pa.array([places[row] for row in rows], pa.int64()))


def _batches(source: Source, columns: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
    """Yield (number of the first row, batch) for the batches that hold one of these ascending rows."""
    file = _open(source.path)
    names = file.schema_arrow.names
    physical = list(dict.fromkeys(part for name in columns for part in _parts(name, names)))
    wanted = np.asarray(rows, dtype=np.int64)
    group_start = 0
    for group in range(file.num_row_groups):
        group_stop = group_start + file.metadata.row_group(group).num_rows
        here = wanted[(wanted >= group_start) & (wanted < group_stop)]
        start = group_start
        # Without a column there is nothing to decode, but rows to count.
        lengths = iter(()) if physical else iter([group_stop - group_start])
        batches = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=physical) if physical else lengths
        try:
            for batch in batches:
                table = pa.Table.from_batches([batch]) if physical else _rows_only(int(batch))
                stop = start + table.num_rows
                if np.any((here >= start) & (here < stop)):
                    yield start, _columns(table, source, columns)
                start = stop
                if not len(here) or start > here[-1]:
                    break
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError(f"{source.path}: damaged: {error}; delete it and run `dvc repro`") from None
        group_start = group_stop


def _rows_only(count: int) -> pa.Table:
    return pa.table({"\0row": pa.nulls(count)})


def _parts(name: str, names: Sequence[str]) -> tuple[str, ...]:
    """The columns of the file that a shown column is made of."""
    if name in names:
        return (name,)
    return DERIVED.get(name, ())


def _columns(table: pa.Table, source: Source, columns: Sequence[str]) -> pa.Table:
    """Select the columns of a batch and compute those that are not in the file."""
    if not columns:
        return table
    arrays = {}
    for name in columns:
        if name in table.column_names:
            arrays[name] = table.column(name)
        elif name == "iteration":
            arrays[name] = pa.array([source.iteration] * table.num_rows, pa.string())
        elif name == "kl":
            arrays[name] = _kl(table, source)
        else:
            lengths = [pc.list_value_length(table.column(part)) for part in DERIVED[name]]
            arrays[name] = lengths[0] if len(lengths) == 1 else pc.add(lengths[0], lengths[1])
    return pa.table(arrays)


def _kl(table: pa.Table, source: Source) -> pa.Array:
    """Sum over a response of logprobs - ref_logprobs, nats."""
    logprobs, offsets = ragged(table.column("logprobs"))
    reference, reference_offsets = ragged(table.column("ref_logprobs"))
    if not np.array_equal(offsets, reference_offsets):
        raise RowMismatch(f"{source.path}: logprobs and ref_logprobs differ in length; run `dvc repro` for its stage")
    return pa.array(sequence_sums(logprobs.astype(np.float64) - reference.astype(np.float64), offsets))


def _require(available: Sequence[str], wanted: Sequence[str], path: Path) -> None:
    if missing := [name for name in dict.fromkeys(wanted) if name not in available]:
        raise RlhfError(f"{path}: has no column {', '.join(missing)}; it has {', '.join(available)}")


def _is_flat(schema: pa.Schema, name: str) -> bool:
    """Whether a column exists and holds lists of plain numbers."""
    if name not in schema.names:
        return False
    kind = schema.field(name).type
    return bool(pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type))


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path}: not a readable Parquet file: {error}") from None


def _iteration_of(directory: Path) -> str | None:
    name = directory.name
    return name.removeprefix("iteration=") if name.startswith("iteration=") else None


def _natural(name: str) -> tuple[int, str]:
    digits = "".join(char for char in name if char.isdigit())
    return (int(digits) if digits else 0, name)
