"""What a reward source without a model sees of a response, and the check of what it returns."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.artifacts.shards import read_shard
from rlhf_core.errors import DataError, RewardError

Row = dict[str, Any]
# From rows to one score each. A row is what row_dictionaries describes.
ScoreRows = Callable[[list[Row]], Sequence[Any]]
COLUMNS = ["sample_id", "prompt", "response", "prompt_ids", "response_ids", "ground_truth", "finish_reason"]


def row_dictionaries(shard: Path) -> list[Row]:
    """Return a shard's responses as sources see them.

    Args:
        shard: A file of the rollouts schema, or one that begins with it.

    Returns:
        For each row sample_id, prompt (rendered), response (without special tokens), prompt_ids, response_ids (the EOS
        included), ground_truth (the parsed JSON value, None where there is none) and finish_reason (stop, length).

    Raises:
        DataError: If a ground_truth is not JSON.
    """
    rows = read_shard(shard, COLUMNS).to_pylist()
    for row in rows:
        if row["ground_truth"] is None:
            continue
        try:
            row["ground_truth"] = json.loads(row["ground_truth"], parse_constant=_finite, parse_float=_finite)
        except ValueError:
            raise DataError(
                f"{shard}: ground_truth of sample {row['sample_id']} is {row['ground_truth']!r}, expected JSON"
                " with finite numbers"
            ) from None
    return rows


def checked_scores(found: Any, sample_ids: Sequence[str], where: str) -> np.ndarray:
    """Return what a source returned as float32, if it is one finite number for each row.

    Args:
        found: A list, tuple or one-dimensional array of numbers. A boolean is not a number here.
        sample_ids: Of the rows, in order.
        where: Names source and shard.

    Returns:
        [B], float32, reward units.

    Raises:
        RewardError: If it is something else; with the row and the value where one row is at fault.
    """
    if isinstance(found, np.ndarray) and found.ndim == 1:
        found = found.tolist()
    if not isinstance(found, list | tuple):
        raise RewardError(f"{where}: returned {type(found).__name__}, expected a list of {len(sample_ids)} numbers")
    if len(found) != len(sample_ids):
        raise RewardError(f"{where}: returned {len(found)} scores for {len(sample_ids)} rows ({_named(sample_ids)})")
    for sample_id, value in zip(sample_ids, found, strict=True):
        if not is_score(value):
            raise RewardError(f"{where}: score of sample {sample_id} is {value!r}, expected a finite number")
    return np.array(found, np.float32)


def is_score(value: Any) -> bool:
    """Tell whether a value is a number that float32 can hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= float(np.finfo(np.float32).max)  # false for NaN and infinity too


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(number)
    return value


def _named(sample_ids: Sequence[str]) -> str:
    return f"{sample_ids[0]} to {sample_ids[-1]}" if sample_ids else "none"
