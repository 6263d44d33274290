"""Rows with their position, from JSONL, JSON, Parquet and the Hugging Face hub.

Types are never inferred from the first block of a file: every row is read by itself, a null is a missing key, and
shapes.py checks what it uses. JSON is read strictly: UTF-8, one value a line, no repeated key, no NaN. Only "\\n" ends
a line, so U+2028 or U+0085 inside a string stay where they are. Not here: what the keys mean (shapes.py).
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.errors import DataError

_RAW = Path("data/raw")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
# Names of a split as data sets write them, and ours.
SPLITS = {"train": "train", "eval": "eval", "test": "eval", "validation": "eval"}

# A file of a split: train.jsonl, train-00000-of-00001.parquet
_SPLIT_NAME = re.compile(rf"(?P<name>{'|'.join(SPLITS)})[.-]")
_HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:@\s]+))?(?::(?P<split>\S+))?")
_BOM = b"\xef\xbb\xbf"
# How other kinds of files begin.
_FOREIGN = {
    b"\x1f\x8b": "a gzip file: end its name in .gz",
    b"\x28\xb5\x2f\xfd": "a zstd file: unpack it, or pack it with gzip",
    b"BZh": "a bzip2 file: unpack it, or pack it with gzip",
    b"\xfd7zXZ": "an xz file: unpack it, or pack it with gzip",
    b"PK\x03\x04": "a zip file: unpack it",
    b"PAR1": "a Parquet file: end its name in .parquet",
    b"\xff\xfe": "UTF-16: save the file as UTF-8",
    b"\xfe\xff": "UTF-16: save the file as UTF-8",
}
_AROUND = 30  # characters shown on each side of a syntax error
_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One row as its source holds it."""

    where: str
    """Position for messages: "file:line", or "file row N" and "hub:name[split] row N" with N counted from 0."""
    source: str
    """The file or data set that it came from."""
    values: dict[str, Any]
    """Keys and values; keys whose value is null are left out."""


def read_rows(source: str) -> Iterator[Row]:
    """Yield the rows of a source in order.

    Args:
        source: A file (.jsonl, .json, both also .gz, .parquet), a directory of such files (read in order of their
            names), or hub:<owner>/<name>[@revision][:split]. Without :split, all splits of a data set are read and each
            row carries its split's name, unless there is only one. So do rows of a directory whose files' names begin
            with a split's (train.jsonl, test-00000-of-00001.parquet), unless there is only one side. A row's own split
            comes first.

    Raises:
        DataError: If the source is missing, empty, cannot be read, or a row is malformed; with file, line and column.
    """
    empty = True
    for row in _hub_rows(source) if source.startswith("hub:") else _path_rows(Path(source)):
        empty = False
        yield row
    if empty:
        raise DataError(f"{source}: expected at least one row, found none")


def source_hash(source: str, rows: list[Row]) -> str:
    """Return the SHA-256 of a source: of the file's or directory's bytes, or of the rows where they came from the hub.

    Args:
        source: As in read_rows.
        rows: What read_rows gave.
    """
    if not source.startswith("hub:"):
        return hash_path(Path(source))
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row.values, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _path_rows(path: Path) -> Iterator[Row]:
    # DVC follows links to files, and data/raw itself, but looks into no linked directory below it.
    for place in (path, *path.parents):
        if _RAW in place.parents and place.is_symlink() and place.is_dir():
            raise DataError(
                f"{place}: a link to a directory, in which DVC would see no change; link its files one by one, or make"
                f" {_RAW} itself the link"
            )
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"{path}: no such file or directory; set ingest.prompts and ingest.preferences in params.yaml")
    for file in files:
        if not file.is_file() or not file.name.endswith(SUFFIXES):
            raise DataError(f"{file}: expected a file named {', '.join('*' + suffix for suffix in SUFFIXES)}")
    sides = [_SPLIT_NAME.match(file.name) for file in files]
    # One name alone says nothing: its rows are split by their hash, as those of a single file are.
    carried = {SPLITS[side["name"]] for side in sides if side} == set(SPLITS.values())
    for file, side in zip(files, sides, strict=True):
        for row in _file_rows(file):
            if carried and side and "split" not in row.values:
                row = replace(row, values={**row.values, "split": side["name"]})
            yield row


def _file_rows(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _jsonl_rows(file)
    else:
        yield from _json_rows(file)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as handle:
            # Iterating over bytes splits at \n only; text mode and splitlines would split elsewhere too.
            for number, line in enumerate(handle, start=1):
                text = _decode(line, path, number)
                if text.strip():
                    values = _parse(text, path, number)
                    yield _row(values, f"{path}:{number}", path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file after line {number}: {error}") from None


def _json_rows(path: Path) -> Iterator[Row]:
    """Rows of a file that is one JSON array of objects; positions are the lines on which the objects begin."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as handle:
            data = handle.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file: {error}") from None
    lines = data.split(b"\n")
    text = "\n".join(_decode(line, path, number) for number, line in enumerate(lines, start=1))
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        raise DataError(f"{path}: expected one JSON array of objects; name a file with one object a line *.jsonl")
    at = _skip(text, at + 1)
    line, counted = 1, 0
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        values, at = _decode_value(text, at, path, line)
        yield _row(values, f"{path}:{line}", path)
        at = _skip(text, at)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            _refuse_syntax(text, at, path, 1, "Expecting ',' or ']'")
        at = _skip(text, at + 1)
        if text[at : at + 1] == "]":
            _refuse_syntax(text, at, path, 1, "Expecting a value after the comma")
    at = _skip(text, at + 1)
    if at < len(text):
        _refuse_syntax(text, at, path, 1, "Extra data after the array")


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) != len(names):
                raise DataError(f"{path}: expected different column names, found {', '.join(names)}")
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                columns = [_column(batch, name, path, number) for name in names]
                for index in range(batch.num_rows):
                    values = {name: column[index] for name, column in zip(names, columns, strict=True)}
                    yield _row(values, f"{path} row {number}", path)
                    number += 1
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as Parquet at or after row {number}: {error}") from None


def _column(batch: pa.RecordBatch, name: str, path: Path, number: int) -> list[Any]:
    """The values of one column of a batch that begins at row `number`."""
    try:
        values: list[Any] = batch.column(name).to_pylist()
    except (OverflowError, ValueError, pa.ArrowException) as error:  # a date beyond Python's, an unknown time zone
        raise DataError(
            f"{path}: the column {name} (Parquet {batch.column(name).type}) cannot be read at or after row {number}:"
            f" {_first_line(error)}; write it in another type, or leave it out of the file"
        ) from None
    return values


def _hub_rows(source: str) -> Iterator[Row]:
    match = _HUB.fullmatch(source)
    if match is None:
        raise DataError(f"{source!r}: expected hub:<owner>/<name>[@revision][:split], such as hub:owner/name:train")
    import datasets  # takes a second, and only this source needs it

    name, split = match["name"], match["split"]
    try:
        found = datasets.load_dataset(name, revision=match["revision"], split=split)
    except ConnectionError as error:
        raise DataError(
            f"{source}: the Hugging Face hub cannot be reached ({error}); connect, or save the data set as Parquet or"
            " JSONL under data/raw and name that file"
        ) from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source}: the data set cannot be loaded: {_first_line(error)}") from None
    parts = found if isinstance(found, dict) else {split: found}
    carried = len(parts) > 1
    if carried and (unknown := [part for part in parts if part not in SPLITS]):
        raise DataError(
            f"{source}: has the splits {', '.join(parts)}; {', '.join(unknown)} is none of {', '.join(SPLITS)}:"
            f" name the one to read, such as {source}:{next(iter(parts))}"
        )
    for part, rows in parts.items():
        for number, values in enumerate(rows):
            if carried and values.get("split") is None:
                values = {**values, "split": part}
            yield _row(values, f"{source}[{part}] row {number}", source)


def _row(values: Any, where: str, source: str | Path) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected an object with keys, found {type(values).__name__}")
    return Row(where, str(source), {key: value for key, value in values.items() if value is not None})


def _decode(line: bytes, path: Path, number: int) -> str:
    """A line of bytes as text, without its end and, on the first line, without a byte order mark."""
    if number == 1:
        if foreign := next((kind for begin, kind in _FOREIGN.items() if line.startswith(begin)), None):
            raise DataError(f"{path}: expected JSON in UTF-8, found {foreign}")
        line = line.removeprefix(_BOM)
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode("utf-8")) + 1
        raise DataError(
            f"{path}:{number}:{column}: expected UTF-8, found byte 0x{line[error.start]:02x}; save the file as UTF-8"
        ) from None


class _Refused(ValueError):
    """Valid for Python's parser, not for us."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _Refused(f"the key {repeated!r} occurs twice in one object")
    return values


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a JSON number; write null or leave the key out")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _parse(text: str, path: Path, number: int) -> Any:
    """The JSON value of one line."""
    values, end = _decode_value(text, _skip(text, 0), path, number)
    end = _skip(text, end)
    if end < len(text):
        _refuse_syntax(text, end, path, number, "Extra data")
    return values


def _skip(text: str, at: int) -> int:
    """Where the next character that is not JSON's white space is."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _decode_value(text: str, start: int, path: Path, line: int) -> tuple[Any, int]:
    """The JSON value that begins at `start` and where it ends; `line` is the line of `start`, for messages."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        # Lines before `start` are counted in `line` already.
        _refuse_syntax(text, error.pos, path, line - text.count("\n", 0, start), error.msg)
    except RecursionError:
        raise DataError(f"{path}:{line}: nested too deeply to be read") from None
    except ValueError as error:
        raise DataError(f"{path}:{line}: {_first_line(error)}") from None


def _refuse_syntax(text: str, at: int, path: Path, first_line: int, problem: str) -> NoReturn:
    line = first_line + text.count("\n", 0, at)
    column = at - text.rfind("\n", 0, at)
    around = text[max(0, at - _AROUND) : at + _AROUND]
    hint = (
        "; a file that is one JSON array must be named *.json"
        if text.startswith("[") and path.suffix != ".json"
        else ""
    )
    raise DataError(f"{path}:{line}:{column}: not valid JSON: {problem}, in {around!r}{hint}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
