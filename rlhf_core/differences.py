"""What differs between two versions of a file that a stage wrote: which column, tensor or key, and by how much."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One part of a file that differs."""

    file: str
    part: str  # a column, tensor or key; "" for the file as a whole
    text: str  # how it differs, for people
    largest: float | None  # largest |difference| where both are floats of one shape; None: no tolerance covers it


def file_differences(one: Path, other: Path, name: str) -> list[Difference]:
    """Return the parts of two files that differ, in the file's own order; nothing where their bytes are equal.

    Args:
        one: Parquet, safetensors, JSON, or anything else, which is compared as a whole.
        other: Of the same name.
        name: What to call it.
    """
    if one.read_bytes() == other.read_bytes():
        return []
    parts = _PARTS.get(one.suffix, lambda path: {})
    before, after = parts(one), parts(other)
    found = []
    for part in dict.fromkeys([*before, *after]):
        if part not in before or part not in after:
            found.append(Difference(name, part, "is in one of the two only", None))
        elif (difference := _difference(before[part], after[part])) is not None:
            found.append(Difference(name, part, *difference))
    return found or [Difference(name, "", "differs in its bytes", None)]


def _difference(one: Any, other: Any) -> tuple[str, float | None] | None:
    """How two values differ, and the largest difference of floats; None where they are equal."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        if one == other:
            return None
        both = f"{json.dumps(one, ensure_ascii=True)[:60]} against {json.dumps(other, ensure_ascii=True)[:60]}"
        floats = isinstance(one, float) and isinstance(other, float)
        return both, abs(one - other) if floats else None
    if one.shape != other.shape:
        return f"has shape {list(one.shape)} against {list(other.shape)}", None
    different = one != other
    if one.dtype.kind == "f":
        different &= ~(np.isnan(one) & np.isnan(other))  # nulls
    share = f"differs in {np.sum(different)} of {one.size} values"
    if not np.any(different):
        return None
    if one.dtype.kind != "f":
        return share, None
    largest = float(np.max(np.abs(np.subtract(one[different], other[different], dtype=np.float64))))
    return (share, None) if np.isnan(largest) else (f"{share}, by at most {largest:.3g}", largest)


def _columns(path: Path) -> dict[str, Any]:
    """A Parquet file's columns, lists of numbers as flat arrays with their lengths, and its metadata."""
    table = pq.read_table(path)
    found: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_list(column.type) and not pa.types.is_nested(column.type.value_type):
            found[f"{name} (lengths)"] = pc.list_value_length(column).to_numpy()
            found[name] = pc.list_flatten(column).to_numpy()
        elif pa.types.is_floating(column.type):
            found[name] = column.to_numpy()
        else:
            found[name] = np.array([json.dumps(row, ensure_ascii=True) for row in column.to_pylist()], object)
    for key, value in (table.schema.metadata or {}).items():
        found[f"metadata {key.decode()}"] = value.decode(errors="replace")
    return found


def _tensors(path: Path) -> dict[str, Any]:
    """A safetensors file's tensors; bfloat16, which numpy does not have, as the float32 of the same value."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data[begin:end], _DTYPES.get(entry["dtype"], "u1"))
        found[name] = values
    return found


def _keys(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {"": content}


_PARTS = {".parquet": _columns, ".safetensors": _tensors, ".json": _keys}
