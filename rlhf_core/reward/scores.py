"""The columns that the score stage appends, their weighted sum, and its metrics."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pyarrow as pa

from rlhf_core.algorithms.mismatch import mismatch
from rlhf_core.algorithms.statistics import mean_and_std, sequence_mean
from rlhf_core.artifacts.schema import outcome_column, score_column, scores_schema
from rlhf_core.artifacts.shards import ragged, ragged_array
from rlhf_core.reward.passes import Passes

logger = logging.getLogger("rlhf")


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


def score_metrics(
    own: pa.Table, replayed: pa.Table | None, rewards: Mapping[str, float], *, dropped: int
) -> dict[str, float]:
    """Return the metrics of data/metrics/score, names and equations as in docs/metrics.md.

    Args:
        own: The iteration's own rows, as append_scores returned them. Without any, what is a mean over them is missing.
        replayed: The rows of earlier iterations, or None where none are replayed.
        rewards: Weight of each source.
        dropped: Rows of both that with_finite_scores left out.
    """
    logprobs, offsets = ragged(own["logprobs"])
    sampler_logprobs, _ = ragged(own["sampler_logprobs"])
    metrics: dict[str, float] = {
        "score/responses": own.num_rows,
        "dropped/nonfinite_score": dropped,
        "val/num_eos_tokens": int(np.sum(own["finish_reason"].to_numpy(zero_copy_only=False) == "stop")),
    }
    metrics |= {f"mismatch/{name}": value for name, value in mismatch(sampler_logprobs, logprobs).items()}
    if own.num_rows:
        ref_logprobs, _ = ragged(own["ref_logprobs"])
        metrics["objective/kl"] = sequence_mean(logprobs.astype(np.float64) - ref_logprobs, offsets)
        metrics["objective/entropy"] = sequence_mean(-logprobs.astype(np.float64), offsets)
        metrics["objective/scores"], metrics["objective/scores_std"] = mean_and_std(own["score"].to_numpy())
        metrics |= source_metrics(own, rewards, "score/")
        if "full_kl" in own.column_names:
            metrics["objective/full_kl"] = sequence_mean(ragged(own["full_kl"])[0], offsets)
    if replayed is not None:
        measured = mismatch(ragged(replayed["sampler_logprobs"])[0], ragged(replayed["logprobs"])[0])
        metrics["replay/responses"] = replayed.num_rows
        metrics |= {f"replay/{name}": measured[name] for name in ("k3", "ess")}
    return metrics


def source_metrics(table: pa.Table, sources: Iterable[str], prefix: str) -> dict[str, float]:
    """Return mean and deviation of each source's scores, and how often its programs ended in which way.

    Args:
        table: At least one row, with the columns of source_columns.
        sources: Their names.
        prefix: Of the metrics' names, before the source's.
    """
    metrics: dict[str, float] = {}
    for source in sources:
        mean, std = mean_and_std(table[score_column(source)].to_numpy())
        metrics |= {f"{prefix}{source}_mean": mean, f"{prefix}{source}_std": std}
        if outcome_column(source) in table.column_names:
            ended = Counter(table[outcome_column(source)].to_pylist())
            metrics |= {f"{prefix}{source}_{kind}": count for kind, count in sorted(ended.items())}
    return metrics


def worst_tokens(own: pa.Table, decode: Callable[[int], str], *, count: int) -> list[dict[str, str | int | float]]:
    """Return the tokens on which sampler and trainer disagree most, the largest |difference| first.

    Args:
        own: The iteration's own rows, as append_scores returned them.
        decode: From a token id to its text.
        count: Tokens at most. Of equal differences the token that comes first in the rows comes first.

    Returns:
        sample_id, position (0 = first response token), token_id, token, sampler_logprob, logprob (nats), and
        difference = sampler_logprob - logprob.
    """
    logprobs, offsets = ragged(own["logprobs"])
    sampler_logprobs, _ = ragged(own["sampler_logprobs"])
    token_ids, _ = ragged(own["response_ids"])
    difference = np.subtract(sampler_logprobs, logprobs, dtype=np.float64)
    worst = np.argsort(-np.abs(difference), kind="stable")[:count]
    rows = np.searchsorted(offsets, worst, side="right") - 1
    return [
        {
            "sample_id": own["sample_id"][int(row)].as_py(),
            "position": int(token - offsets[row]),
            "token_id": int(token_ids[token]),
            "token": decode(int(token_ids[token])),
            "sampler_logprob": float(sampler_logprobs[token]),
            "logprob": float(logprobs[token]),
            "difference": float(difference[token]),
        }
        for token, row in zip(worst, rows, strict=True)
    ]
