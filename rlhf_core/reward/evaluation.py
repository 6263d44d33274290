"""The columns and metrics of an evaluation: the judge (true reward) beside the reward model (proxy)."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.algorithms.statistics import mean_and_std, sequence_mean
from rlhf_core.artifacts.schema import EVALUATIONS
from rlhf_core.artifacts.shards import ragged, ragged_array
from rlhf_core.reward.passes import Passes


def append_judgements(table: pa.Table, shard: str, passes: Passes, has_reward_model: bool) -> pa.Table:
    """Return sampled responses with logprobs, ref_logprobs and both scores.

    Args:
        table: One shard of samples, in the rollouts schema.
        shard: Its file name, by which the passes stored their results.
        passes: After they ran. Without a ref_logprobs pass the policy is the reference itself.
        has_reward_model: Without one, score_reward_model is null.
    """
    _, offsets = ragged(table["response_ids"])
    logprobs = passes.result("logprobs", shard)
    same_model = not passes.has("ref_logprobs")
    ref_logprobs = logprobs if same_model else passes.result("ref_logprobs", shard)
    proxy = (
        pa.array(passes.result("score_reward_model", shard))
        if has_reward_model
        else pa.nulls(table.num_rows, pa.float32())
    )
    for name, column in (
        ("logprobs", ragged_array(logprobs, offsets, pa.float32())),
        ("ref_logprobs", ragged_array(ref_logprobs, offsets, pa.float32())),
        ("score_judge", pa.array(passes.result("score_judge", shard))),
        ("score_reward_model", proxy),
    ):
        table = table.append_column(name, column)
    return table.cast(EVALUATIONS)


def evaluation_metrics(tables: Sequence[pa.Table]) -> dict[str, float]:
    """Return the metrics of data/metrics/evaluate, names and equations as in docs/metrics.md."""
    table = pa.concat_tables(tables)
    logprobs, offsets = ragged(table["logprobs"])
    ref_logprobs, _ = ragged(table["ref_logprobs"])
    judge_mean, judge_std = mean_and_std(table["score_judge"].to_numpy())
    metrics = {
        "eval/judge_mean": judge_mean,
        "eval/judge_std": judge_std,
        "eval/finished": float(np.mean(pc.equal(table["finish_reason"], "stop").to_numpy())),
        "eval/kl": sequence_mean(logprobs.astype(np.float64) - ref_logprobs, offsets),
        "eval/response_length_mean": float(np.mean(np.diff(offsets))),
        "eval/responses": table.num_rows,
        "eval/prompts": pc.count_distinct(table["prompt_id"]).as_py(),
    }
    if table["score_reward_model"].null_count == 0:
        metrics["eval/reward_model_mean"] = mean_and_std(table["score_reward_model"].to_numpy())[0]
    return metrics
