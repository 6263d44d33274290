"""What a reward source without a model sees of a response, and the check of what it returns."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_core.artifacts.shards import read_shard
from rlhf_core.errors import AnswerError, DataError

Row = dict[str, Any]
# From rows to one score each. A row is what row_dictionaries describes.
ScoreRows = Callable[[list[Row]], Sequence[Any]]
DROP_HINT = "score.nonfinite_scores: drop leaves such responses out of training"
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


def checked_scores(found: Any, sample_ids: Sequence[str], *, nonfinite: Literal["error", "drop"]) -> list[float]:
    """Return what a source returned, if it is one number for each row.

    Args:
        found: A list, tuple or one-dimensional array of numbers. A boolean is not a number here.
        sample_ids: Of the rows, in order.
        nonfinite: error | drop, for a number that float32 cannot hold: NaN, infinite, or too large.

    Returns:
        [B], reward units; NaN for a row that is to be dropped.

    Raises:
        AnswerError: If it is something else; with the row and the value where one row is at fault.
    """
    if isinstance(found, np.ndarray) and found.ndim == 1:
        found = found.tolist()
    if not isinstance(found, list | tuple):
        raise AnswerError(f"returned {_kind(found)}, expected a list of {len(sample_ids)} numbers")
    if len(found) != len(sample_ids):
        raise AnswerError(f"returned {len(found)} scores for {len(sample_ids)} rows ({_named(sample_ids)})")
    return [
        _number(value, f"score of sample {sample_id}", nonfinite)
        for sample_id, value in zip(sample_ids, found, strict=True)
    ]


def _number(value: Any, where: str, nonfinite: Literal["error", "drop"]) -> float:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnswerError(f"{where} is {value!r}, expected a finite number")
    if abs(value) <= float(np.finfo(np.float32).max):  # false for NaN and infinity too
        return float(value)
    if nonfinite == "drop":
        return math.nan
    raise AnswerError(f"{where} is {value!r}, expected a finite number ({DROP_HINT})")


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(number)
    return value


def _kind(found: Any) -> str:
    return f"an array of shape {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__


def _named(sample_ids: Sequence[str]) -> str:
    return f"{sample_ids[0]} to {sample_ids[-1]}" if sample_ids else "none"
