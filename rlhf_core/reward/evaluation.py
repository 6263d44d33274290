"""The columns and metrics of an evaluation: the score that policies are compared by, and the reward model's (proxy)."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.algorithms.statistics import mean_and_std, sequence_mean
from rlhf_core.artifacts.schema import evaluations_schema, score_column
from rlhf_core.artifacts.shards import ragged, ragged_array
from rlhf_core.reward.measures import source_metrics
from rlhf_core.reward.passes import Passes
from rlhf_core.reward.scores import source_columns

PROXY = "reward_model_score"  # pass and column of the trained reward model


def append_evaluation(table: pa.Table, shard: str, passes: Passes, rewards: Mapping[str, float]) -> pa.Table:
    """Return sampled responses with logprobs, ref_logprobs, scores by source, score, and the reward model's score.

        score = sum over sources of weight * score_source

    Args:
        table: One shard of samples, in the rollouts schema.
        shard: Its file name, by which the passes stored their results.
        passes: After they ran. Without a ref_logprobs pass the policy is the reference itself; without one of the
            trained reward model its column is null.
        rewards: Weight of each source of evaluate.rewards.
    """
    _, offsets = ragged(table["response_ids"])
    logprobs = passes.result("logprobs", shard)
    ref_logprobs = passes.result("ref_logprobs", shard) if passes.has("ref_logprobs") else logprobs
    scores, outcomes = source_columns(shard, passes, rewards, rows=table.num_rows)
    proxy = pa.array(passes.result(PROXY, shard)) if passes.has(PROXY) else pa.nulls(table.num_rows, pa.float32())
    columns = {
        "logprobs": ragged_array(logprobs, offsets, pa.float32()),
        "ref_logprobs": ragged_array(ref_logprobs, offsets, pa.float32()),
        **scores,
        PROXY: proxy,
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table.cast(evaluations_schema(list(rewards), outcomes=outcomes))


def evaluation_metrics(tables: Sequence[pa.Table], sources: Iterable[str]) -> dict[str, float]:
    """Return the metrics of data/metrics/evaluate, names and equations as in docs/metrics.md.

    Args:
        tables: All shards, as append_evaluation returned them.
        sources: Names of evaluate.rewards.
    """
    table = pa.concat_tables(tables)
    logprobs, offsets = ragged(table["logprobs"])
    ref_logprobs, _ = ragged(table["ref_logprobs"])
    mean, std = mean_and_std(table["score"].to_numpy())
    metrics = {
        "eval/score_mean": mean,
        "eval/score_std": std,
        "eval/finished": float(np.mean(pc.equal(table["finish_reason"], "stop").to_numpy())),
        "eval/kl": sequence_mean(logprobs.astype(np.float64) - ref_logprobs, offsets),
        "eval/response_length_mean": float(np.mean(np.diff(offsets))),
        "eval/responses": table.num_rows,
        "eval/prompts": pc.count_distinct(table["prompt_id"]).as_py(),
        **source_metrics(table, sources, "eval/" + score_column("")),
    }
    if table[PROXY].null_count == 0:
        metrics["eval/reward_model_mean"] = mean_and_std(table[PROXY].to_numpy())[0]
    return metrics
