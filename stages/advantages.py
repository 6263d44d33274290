"""Token rewards, advantages and returns, appended to data/scores: `python -m stages.advantages ITERATION`.

All shards are computed as one flat array (about 100 bytes a token), so that no number depends on how the rows were cut
into shards. Needs no model.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.algorithms.estimates import Estimates, estimate
from rlhf_core.algorithms.ragged import Offsets
from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import advantages_schema
from rlhf_core.artifacts.shards import iter_tables, ragged, ragged_array, read_metadata, read_table, write_shard
from rlhf_core.config import AdvantageParams, load_run
from rlhf_core.errors import StaleInput
from rlhf_core.stage import publish, run_stage, work_directory, write_json

NEEDED = ["sample_id", "finish_reason", "logprobs", "ref_logprobs", "values", "score"]


def main() -> None:
    """Compute over all shards of data/scores, then write each of them again with three columns more."""
    iteration = sys.argv[1]
    params = load_run().at(iteration).advantages
    source = Path(f"data/scores/iteration={iteration}")
    metadata = read_metadata(source)
    if metadata["iteration"] != iteration:
        raise StaleInput(f"{source}: holds iteration {metadata['iteration']}; run `dvc repro -f score@{iteration}`")
    inputs = {**metadata["inputs"], "scores": hash_path(source)}
    metadata |= {"stage": "advantages", "inputs": inputs, "advantages": params.model_dump()}
    offsets, found = compute(source, params)
    work = work_directory(f"advantages@{iteration}", metadata)
    row = 0
    for name, table in iter_tables(source):
        schema, bounds = advantages_schema(table.schema), offsets[row : row + table.num_rows + 1]
        for column in ("rewards", "advantages", "returns"):
            values = getattr(found, column)[bounds[0] : bounds[-1]]
            table = table.append_column(column, ragged_array(values, bounds - bounds[0], pa.float32()))
        write_shard(work / name, table, schema, metadata)
        row += table.num_rows
    publish(work, Path(f"data/advantages/iteration={iteration}"))
    write_json(Path(f"data/metrics/advantages/{iteration}.json"), found.metrics)


def compute(source: Path, params: AdvantageParams) -> tuple[Offsets, Estimates]:
    """Return the offsets of all rows, and what is estimated for their tokens."""
    table = read_table(source, NEEDED)
    logprobs, offsets = ragged(table["logprobs"])
    ref_logprobs, values = (ragged(table[column])[0] for column in ("ref_logprobs", "values"))
    scores, finished = table["score"].to_numpy(), pc.equal(table["finish_reason"], "stop").to_numpy()
    return offsets, estimate(logprobs, ref_logprobs, values, scores, finished, offsets, **params.model_dump())


if __name__ == "__main__":
    run_stage("advantages@" + sys.argv[1], main)
