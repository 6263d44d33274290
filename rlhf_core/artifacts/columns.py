"""Between the columns of data/scores and data/advantages and the arrays that the algorithms work on."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.algorithms.estimates import Estimates
from rlhf_core.algorithms.ragged import Groups, Offsets, PerToken
from rlhf_core.algorithms.responses import Responses
from rlhf_core.artifacts.shards import column_names, ragged, ragged_array, read_table

_ALWAYS = ["sample_id", "finish_reason", "score", "sampler_logprobs", "logprobs", "ref_logprobs"]
_MAYBE = ["full_kl", "values", "bootstrap_value"]


def read_responses(scores: Path, iteration: str) -> Responses:
    """Read what advantages are computed from, of all shards as one batch; nothing else is read.

    Args:
        scores: Directory of data/scores.
        iteration: Whose responses are "own": those whose sample_id begins with it.

    Returns:
        Responses in the order of the shards. Without a column of _MAYBE its array is None.

    Raises:
        ArtifactError: As read_table.
    """
    names = column_names(scores)
    table = read_table(scores, [*_ALWAYS, *(name for name in _MAYBE if name in names)])
    tokens = {
        name: ragged(table[name])[0]
        for name in ("sampler_logprobs", "logprobs", "ref_logprobs", "full_kl", "values")
        if name in table.column_names
    }
    return Responses(
        offsets=ragged(table["logprobs"])[1],
        own=pc.starts_with(table["sample_id"], f"{iteration}-").to_numpy(),
        groups=_groups(table["sample_id"]),
        finished=pc.equal(table["finish_reason"], "stop").to_numpy(),
        scores=table["score"].to_numpy(),
        sampler_logprobs=tokens["sampler_logprobs"],
        logprobs=tokens["logprobs"],
        ref_logprobs=tokens["ref_logprobs"],
        full_kl=tokens.get("full_kl"),
        values=tokens.get("values"),
        bootstrap_values=table["bootstrap_value"].to_numpy() if "bootstrap_value" in table.column_names else None,
    )


def with_estimates(table: pa.Table, row: int, offsets: Offsets, found: Estimates, weights: PerToken) -> pa.Table:
    """Return one shard with the columns of data/advantages appended.

    Args:
        table: A shard of data/scores.
        row: Number of its first row among all rows.
        offsets: [B + 1], int64, of all rows.
        found: For all rows.
        weights: [N], the importance weights of all tokens.
    """
    bounds = offsets[row : row + table.num_rows + 1]
    columns = {"importance_weights": weights, "rewards": found.rewards, "advantages": found.advantages}
    if found.returns is not None:
        columns["returns"] = found.returns
    for name, values in columns.items():
        items = values[bounds[0] : bounds[-1]]
        table = table.append_column(name, ragged_array(items, bounds - bounds[0], pa.float32()))
    if found.bootstrap_returns is not None:
        # NaN stands for a row without a slot; on disk that is a null.
        at_end = found.bootstrap_returns[row : row + table.num_rows]
        table = table.append_column("bootstrap_return", pa.array(at_end, pa.float32(), from_pandas=True))
    return table


def _groups(sample_ids: pa.ChunkedArray) -> Groups:
    """One number per prompt and iteration: what stands before the last "-" of a sample_id."""
    keys = pc.list_element(pc.split_pattern(sample_ids, "-", max_splits=1, reverse=True), 0)
    chunks = keys.dictionary_encode().unify_dictionaries().chunks
    return np.concatenate([np.empty(0, np.int64), *(chunk.indices.to_numpy().astype(np.int64) for chunk in chunks)])
