"""The columns that the score stage appends, and their weighted sum."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.artifacts.schema import outcome_column, score_column, scores_schema
from rlhf_core.artifacts.shards import ragged, ragged_array, read_shard, write_shard
from rlhf_core.reward.measures import Measures, measures
from rlhf_core.reward.passes import Passes

logger = logging.getLogger("rlhf")


def write_scores(
    passes: Passes, out: Path, metadata: dict[str, Any], rewards: Mapping[str, float], *, full_kl: bool, worst: int
) -> list[Measures]:
    """Write every shard with its new columns and return what was measured of each, one shard in memory at a time.

    Args:
        passes: After they ran.
        out: Directory of the new shards.
        metadata: Theirs.
        rewards: Weight of each source.
        full_kl: Whether the column is wanted.
        worst: As for measures.
    """
    found = []
    for name, path in passes.shards.items():
        whole = append_scores(read_shard(path), name, passes, rewards, full_kl=full_kl)
        table = with_finite_scores(whole, rewards)
        write_shard(out / name, table, table.schema, metadata)
        found.append(measures(table, rewards, dropped=whole.num_rows - table.num_rows, worst=worst))
    return found


def append_scores(
    table: pa.Table, shard: str, passes: Passes, rewards: Mapping[str, float], *, full_kl: bool
) -> pa.Table:
    """Return a rollouts shard with logprobs, ref_logprobs, full KL and values if any, scores by source, and score.

        score = sum over sources of weight * score_source

    Args:
        table: A rollouts shard.
        shard: Its name, by which the passes stored their results.
        passes: After they ran. Without a ref_logprobs pass the policy is the reference itself, so its full KL is 0.
        rewards: Weight of each source.
        full_kl: Whether the column is wanted.
    """
    _, offsets = ragged(table["response_ids"])
    logprobs = passes.result("logprobs", shard)
    same_model = not passes.has("ref_logprobs")
    per_token = {"logprobs": logprobs, "ref_logprobs": logprobs if same_model else passes.result("ref_logprobs", shard)}
    if full_kl:
        per_token["full_kl"] = np.zeros_like(logprobs) if same_model else passes.result("full_kl", shard)
    if critic := passes.has("values"):
        per_token["values"] = passes.result("values", shard)
    columns = {name: ragged_array(values, offsets, pa.float32()) for name, values in per_token.items()}
    if critic:
        columns["bootstrap_value"] = pa.array(passes.result("bootstrap_value", shard), pa.float32())
    found, outcomes = source_columns(shard, passes, rewards, rows=table.num_rows)
    for name, column in {**columns, **found}.items():
        table = table.append_column(name, column)
    return table.cast(scores_schema(list(rewards), critic=critic, full_kl=full_kl, outcomes=outcomes))


def source_columns(
    shard: str, passes: Passes, rewards: Mapping[str, float], *, rows: int
) -> tuple[dict[str, pa.Array], list[str]]:
    """Return a shard's scores by source, outcomes of those that have any, and score; and the sources with outcomes.

        score = sum over sources of weight * score_source

    Args:
        shard: Its name, by which the passes stored their results.
        passes: After those of the sources ran.
        rewards: Weight of each source.
        rows: Of the shard.
    """
    columns: dict[str, pa.Array] = {}
    total, outcomes = np.zeros(rows, np.float64), []
    for source, weight in rewards.items():
        scores = passes.result(score_column(source), shard)
        columns[score_column(source)] = pa.array(scores, pa.float32())
        total += weight * scores.astype(np.float64)
        if (ended := passes.outcomes(source, shard)) is not None:
            columns[outcome_column(source)] = pa.array(ended, pa.string())
            outcomes.append(source)
    columns["score"] = pa.array(total.astype(np.float32))
    return columns, outcomes


def with_finite_scores(table: pa.Table, rewards: Iterable[str]) -> pa.Table:
    """Return the rows that every source gave a number, those of weight 0 too; each other one is named in the log.

    Args:
        table: As append_scores returned it.
        rewards: Names of the sources.
    """
    keep = np.ones(table.num_rows, bool)
    for source in rewards:
        bad = ~np.isfinite(table[score_column(source)].to_numpy())
        for sample_id in table["sample_id"].filter(pa.array(bad)).to_pylist():
            logger.warning("the score of sample %s by source %s is not finite; it is dropped", sample_id, source)
        keep &= ~bad
    return table.filter(pa.array(keep))
