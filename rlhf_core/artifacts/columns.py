"""Between the columns of data/scores and data/advantages and the arrays that the algorithms work on."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.algorithms.iteration import Finished
from rlhf_core.algorithms.ragged import Groups
from rlhf_core.algorithms.responses import Responses
from rlhf_core.artifacts.checks import list_lengths
from rlhf_core.artifacts.shards import ragged, ragged_array

# What advantages are computed from; the others of a shard are carried on.
USED = ["sample_id", "finish_reason", "score", "sampler_logprobs", "logprobs", "ref_logprobs"]
USED_WHERE_THERE = ["full_kl", "values", "bootstrap_value"]


def group_numbers(sample_ids: pa.ChunkedArray) -> Groups:
    """Return one number per prompt and iteration: what stands before the last "-" of a sample_id.

    Args:
        sample_ids: Of all shards: equal keys get equal numbers wherever they are.
    """
    keys = pc.list_element(pc.split_pattern(sample_ids, "-", max_splits=1, reverse=True), 0)
    numbers: Groups = keys.combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers


def responses_of(table: pa.Table, first_row: int, groups: Groups, iteration: str) -> Responses:
    """Return what advantages are computed from, of one shard.

    Args:
        table: With the columns USED, and those of USED_WHERE_THERE that the artifact has: the array of another is None.
        first_row: Number of its first row among all rows.
        groups: Of all rows.
        iteration: Whose responses are "own": those whose sample_id begins with it.
    """
    tokens = {
        name: _items(table[name])
        for name in ("sampler_logprobs", "logprobs", "ref_logprobs", "full_kl", "values")
        if name in table.column_names
    }
    return Responses(
        first_row=first_row,
        offsets=np.concatenate([[0], np.cumsum(list_lengths(table["logprobs"]))]).astype(np.int64),
        own=pc.starts_with(table["sample_id"], f"{iteration}-").to_numpy(),
        groups=groups[first_row : first_row + table.num_rows],
        finished=pc.equal(table["finish_reason"], "stop").to_numpy(),
        scores=table["score"].to_numpy(),
        sampler_logprobs=tokens["sampler_logprobs"],
        logprobs=tokens["logprobs"],
        ref_logprobs=tokens["ref_logprobs"],
        full_kl=tokens.get("full_kl"),
        values=tokens.get("values"),
        bootstrap_values=table["bootstrap_value"].to_numpy() if "bootstrap_value" in table.column_names else None,
    )


def estimated_columns(found: Finished) -> dict[str, np.ndarray]:
    """Return the columns that are written for some responses, float32: of tokens [N], bootstrap_return [B]."""
    columns = {
        "importance_weights": found.weights,
        "rewards": found.estimates.rewards,
        "advantages": found.estimates.advantages,
        "returns": found.estimates.returns,
        "bootstrap_return": found.estimates.bootstrap_returns,
    }
    with np.errstate(over="ignore"):  # an infinity stops the stage where it would be written
        return {name: values.astype(np.float32) for name, values in columns.items() if values is not None}


def with_estimates(table: pa.Table, offsets: np.ndarray, parts: Sequence[dict[str, np.ndarray]]) -> pa.Table:
    """Return one shard with the columns of data/advantages appended.

    Args:
        table: A shard of data/scores.
        offsets: [B + 1], int64, of its rows.
        parts: From estimated_columns, of all its rows in order. None of them for a shard without rows.
    """
    for name in parts[0] if parts else ():
        values = np.concatenate([part[name] for part in parts])
        if name == "bootstrap_return":
            # NaN stands for a row without a slot; on disk that is a null.
            table = table.append_column(name, pa.array(values, pa.float32(), from_pandas=True))
        else:
            table = table.append_column(name, ragged_array(values, offsets, pa.float32()))
    return table


def _items(column: pa.ChunkedArray) -> np.ndarray:
    """All list items of a column that was checked; of a single chunk, as nearly all are, a view."""
    if column.num_chunks == 1:
        items: np.ndarray = column.chunk(0).flatten().to_numpy()
        return items
    return ragged(column)[0]
