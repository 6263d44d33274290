"""The columns that the score stage appends, their weighted sum, and its metrics."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from rlhf_core.algorithms.mismatch import mismatch
from rlhf_core.algorithms.statistics import mean_and_std, sequence_mean
from rlhf_core.artifacts.schema import score_column, scores_schema
from rlhf_core.artifacts.shards import ragged, ragged_array
from rlhf_core.reward.passes import Passes


def append_scores(table: pa.Table, shard: str, passes: Passes, rewards: Mapping[str, float]) -> pa.Table:
    """Return a rollouts shard with logprobs, ref_logprobs, values, one score per source, and score.

        score = sum over sources of weight * score_source

    Args:
        table: A rollouts shard.
        shard: Its file name, by which the passes stored their results.
        passes: After they ran. Without a ref_logprobs pass the policy is the reference itself.
        rewards: Weight of each source.
    """
    _, offsets = ragged(table["response_ids"])
    logprobs = passes.result("logprobs", shard)
    same_model = not (passes.work / "ref_logprobs").exists()
    columns = {
        "logprobs": ragged_array(logprobs, offsets, pa.float32()),
        "ref_logprobs": ragged_array(
            logprobs if same_model else passes.result("ref_logprobs", shard), offsets, pa.float32()
        ),
        "values": ragged_array(passes.result("logprobs-values", shard), offsets, pa.float32()),
    }
    total = np.zeros(table.num_rows, np.float64)
    for source, weight in rewards.items():
        scores = passes.result(source, shard)
        columns[score_column(source)] = pa.array(scores, pa.float32())
        total += weight * scores.astype(np.float64)
    columns["score"] = pa.array(total.astype(np.float32))
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table.cast(scores_schema(list(rewards)))


def score_metrics(tables: Sequence[pa.Table], rewards: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of data/metrics/score, names and equations as in docs/metrics.md.

    Args:
        tables: All shards of one iteration, as append_scores returned them.
        rewards: Weight of each source.
    """
    table = pa.concat_tables(tables)
    logprobs, offsets = ragged(table["logprobs"])
    ref_logprobs, _ = ragged(table["ref_logprobs"])
    sampler_logprobs, _ = ragged(table["sampler_logprobs"])
    scores_mean, scores_std = mean_and_std(table["score"].to_numpy())
    metrics = {
        "objective/kl": sequence_mean(logprobs.astype(np.float64) - ref_logprobs, offsets),
        "objective/entropy": sequence_mean(-logprobs.astype(np.float64), offsets),
        "objective/scores": scores_mean,
        "objective/scores_std": scores_std,
        "score/responses": table.num_rows,
        "val/num_eos_tokens": int(np.sum(table["finish_reason"].to_numpy(zero_copy_only=False) == "stop")),
    }
    metrics |= {f"mismatch/{name}": value for name, value in mismatch(sampler_logprobs, logprobs).items()}
    for source in rewards:
        mean, std = mean_and_std(table[score_column(source)].to_numpy())
        metrics |= {f"score/{source}_mean": mean, f"score/{source}_std": std}
    return metrics
