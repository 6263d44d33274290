"""Rewards, advantages, returns and importance weights, appended to data/scores: `stages.advantages ITERATION PREV`.

Shards are read, computed and written one by one, in a thread for each core; of all rows only sample ids and groups are
held at once (rlhf_core/algorithms/iteration.py). Needs no model. What reward shaping carries from iteration to
iteration is read from data/reward_state/PREV.json and written to data/reward_state/ITERATION.json.
"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_core.algorithms.conventions import CONVENTIONS
from rlhf_core.algorithms.iteration import Known, Recipe, Totals, finished, known_of, metrics_of, next_state
from rlhf_core.algorithms.moments import RowMoments
from rlhf_core.algorithms.ragged import Groups
from rlhf_core.algorithms.responses import Responses
from rlhf_core.algorithms.reward_state import Moments, RewardState
from rlhf_core.artifacts.columns import (
    USED,
    USED_WHERE_THERE,
    estimated_columns,
    group_numbers,
    responses_of,
    with_estimates,
)
from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import advantages_schema
from rlhf_core.artifacts.shards import (
    column_names,
    read_metadata,
    read_shard,
    read_table,
    row_counts,
    shard_paths,
    write_shard,
)
from rlhf_core.config import load_run
from rlhf_core.errors import ArtifactError, StaleInput
from rlhf_core.stage import publish, run_stage, work_directory, write_json

STATES = Path("data/reward_state")
THREADS = 2  # shards that are in memory at once: one is read or computed while another is written
BLOCK = 2**16  # tokens that are computed at once: their arrays stay in a core's cache


@dataclass(frozen=True)
class Shard:
    """One shard of data/scores, and where its rows are among those of all shards."""

    path: Path
    first_row: int
    groups: Groups  # of all rows
    iteration: str

    def responses(self, table: pa.Table) -> Responses:
        """Return what advantages are computed from."""
        return responses_of(table, self.first_row, self.groups, self.iteration)


def main() -> None:
    """Find what is to be known of all shards of data/scores, then write each of them again with its new columns."""
    iteration, prev = sys.argv[1:3]
    params = load_run().at(iteration)
    source, before = Path(f"data/scores/iteration={iteration}"), STATES / f"{prev}.json"
    metadata = read_metadata(source)
    if metadata["iteration"] != iteration:
        raise StaleInput(f"{source}: holds iteration {metadata['iteration']}; run `dvc repro -f score@{iteration}`")
    state, shards = read_state(before), numbered(source, iteration)
    recipe = Recipe(
        **params.advantages.model_dump(),
        conventions=CONVENTIONS[params.conventions],
        max_new_tokens=metadata["sampling"]["max_new_tokens"],
    )
    metadata |= {
        "stage": "advantages",
        "inputs": {**metadata["inputs"], str(source): hash_path(source), str(before): hash_path(before)},
        "conventions": params.conventions,
        "advantages": params.advantages.model_dump(),
    }
    work = work_directory(f"advantages@{iteration}", metadata)
    columns = [*USED, *(name for name in USED_WHERE_THERE if name in column_names(source))]
    totals = Totals()
    with ThreadPoolExecutor(THREADS) as pool:

        def each(compute: Callable[[Responses], Any]) -> Iterator[Any]:
            def of_shard(shard: Shard) -> list[Any]:
                responses = shard.responses(read_shard(shard.path, columns))
                return [compute(block) for block in responses.blocks(BLOCK)]

            return chain.from_iterable(pool.map(of_shard, shards))

        known = known_of(each, recipe, state)
        for parts in pool.map(lambda shard: write(shard, work, recipe, known, metadata), shards):
            for part in parts:
                totals.add(*part)
    publish(work, Path(f"data/advantages/iteration={iteration}"))
    write_json(STATES / f"{iteration}.json", asdict(next_state(totals, recipe, known, state)))
    write_json(Path(f"data/metrics/advantages/{iteration}.json"), metrics_of(totals, known))


def numbered(source: Path, iteration: str) -> list[Shard]:
    """Return all shards, with groups over all their rows, after checking that no sample id occurs twice."""
    groups = group_numbers(read_table(source, ["sample_id"])["sample_id"])
    firsts = accumulate(row_counts(source), initial=0)
    return [Shard(path, first, groups, iteration) for path, first in zip(shard_paths(source), firsts, strict=False)]


def write(
    shard: Shard, work: Path, recipe: Recipe, known: Known, metadata: dict[str, Any]
) -> list[tuple[dict[str, RowMoments], dict[str, int]]]:
    """Write one shard with its new columns, and return what the metrics need of each block of it."""
    table = read_shard(shard.path)
    responses = shard.responses(table)
    columns, sums = [], []
    for block in responses.blocks(BLOCK):
        found = finished(block, recipe, known)
        columns.append(estimated_columns(found))
        sums.append((found.moments, found.counts))
    whole = with_estimates(table, responses.offsets, columns)
    write_shard(work / shard.path.name, whole, advantages_schema(table.schema), metadata)
    return sums


def read_state(path: Path) -> RewardState:
    """Read what the previous iteration's reward shaping left.

    Raises:
        ArtifactError: If the file is missing or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return RewardState(kl_coef=found["kl_coef"], scores=Moments(**found["scores"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path}: not a reward state ({error}); run `dvc repro` for the stage that writes it"
        ) from None


if __name__ == "__main__":
    run_stage("advantages@" + sys.argv[1], main)
