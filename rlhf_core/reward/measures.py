"""What score measures of the responses, shard by shard, and the metrics that come of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.algorithms.mismatch import mismatch_of, mismatch_sums
from rlhf_core.algorithms.statistics import mean_and_std, sequence_sums, token_mean
from rlhf_core.artifacts.schema import outcome_column, score_column
from rlhf_core.artifacts.shards import ragged
from rlhf_core.errors import NumericError

Token = dict[str, Any]  # of worst_tokens


@dataclass(frozen=True)
class Measures:
    """What the metrics need of one shard, and no more: some 50 bytes a row, nothing for each token."""

    rows: pa.Table  # [B] finish_reason, score, scores and outcomes by source; under a metric's name, sums over tokens
    mismatch: dict[str, float]  # of mismatch_sums
    worst: list[Token]
    dropped: int  # rows that with_finite_scores left out


def measures(table: pa.Table, rewards: Iterable[str], *, dropped: int, worst: int) -> Measures:
    """Return a shard's share of the metrics; score_metrics puts the shares together.

    Args:
        table: A shard with the columns of append_scores.
        rewards: Names of the sources.
        dropped: Rows that are not in it any more.
        worst: How many tokens worst_tokens lists.
    """
    logprobs, offsets = ragged(table["logprobs"])
    sampler_logprobs, _ = ragged(table["sampler_logprobs"])
    tokens = {
        "objective/kl": logprobs.astype(np.float64) - ragged(table["ref_logprobs"])[0],
        "objective/entropy": -logprobs.astype(np.float64),
    }
    if "full_kl" in table.column_names:
        tokens["objective/full_kl"] = ragged(table["full_kl"])[0]
    sources = [name for source in rewards for name in (score_column(source), outcome_column(source))]
    rows = table.select(["finish_reason", "score", *(name for name in sources if name in table.column_names)])
    for name, values in tokens.items():  # null: a response of no tokens does not count
        sums = pa.array(sequence_sums(values, offsets), pa.float64(), mask=np.diff(offsets) == 0)
        rows = rows.append_column(name, sums)
    return Measures(rows, mismatch_sums(sampler_logprobs, logprobs), worst_tokens(table, count=worst), dropped)


def worst_tokens(table: pa.Table, *, count: int) -> list[Token]:
    """Return the tokens on which sampler and trainer disagree most, the largest |difference| first.

    Args:
        table: A shard with the columns of append_scores.
        count: Tokens at most. Of equal differences the token that comes first in the rows comes first.

    Returns:
        sample_id, position (0 = first response token), token_id, sampler_logprob, logprob (nats), and
        difference = sampler_logprob - logprob.
    """
    logprobs, offsets = ragged(table["logprobs"])
    sampler_logprobs, _ = ragged(table["sampler_logprobs"])
    token_ids, _ = ragged(table["response_ids"])
    difference = np.subtract(sampler_logprobs, logprobs, dtype=np.float64)
    worst = np.argsort(-np.abs(difference), kind="stable")[:count]
    rows = np.searchsorted(offsets, worst, side="right") - 1
    return [
        {
            "sample_id": table["sample_id"][int(row)].as_py(),
            "position": int(token - offsets[row]),
            "token_id": int(token_ids[token]),
            "sampler_logprob": float(sampler_logprobs[token]),
            "logprob": float(logprobs[token]),
            "difference": float(difference[token]),
        }
        for token, row in zip(worst, rows, strict=True)
    ]


def mismatch_report(own: Sequence[Measures], decode: Callable[[int], str], *, count: int) -> dict[str, Any]:
    """Return what data/mismatch holds beside the iteration: the measures, and the worst tokens of all shards.

    Args:
        own: Of all shards of the iteration's own rows.
        decode: From a token id to its text.
        count: Tokens at most, as for worst_tokens.
    """
    found = sorted((token for part in own for token in part.worst), key=lambda token: -abs(token["difference"]))
    worst = [{**token, "token": decode(token["token_id"])} for token in found[:count]]
    return {**mismatch_of([part.mismatch for part in own]), "worst_tokens": worst}


def check_mismatch(report: dict[str, Any], bound: float, where: Path) -> None:
    """Stop where sampler and trainer disagree too much about the iteration's own responses.

    Args:
        report: Of mismatch_report.
        bound: score.max_mismatch_k3, nats a token.
        where: The file that holds the report.

    Raises:
        NumericError: With the measure, its bound, the worst responses, and where all measures are.
    """
    if report["k3"] <= bound:
        return
    named = "".join(
        f"; {token['sample_id']} position {token['position']} ({token['difference']:+.3g} nats)"
        for token in report["worst_tokens"][:3]
    )
    raise NumericError(
        f"sampler and trainer disagree about the sampler's own policy by {report['k3']:.4g} nats a token (mismatch/k3),"
        f" allowed is score.max_mismatch_k3 = {bound}. The worst tokens{named or ': none are listed'}; more in {where}."
        " Likely causes: another temperature or dtype on one side, or weights that one side does not load."
        " sampling.dtype bfloat16 goes with compute.precision bf16-autocast, float32 with float32"
    )


def check_rows_are_left(iteration: str, parts: Sequence[Measures]) -> None:
    """Stop where no response has a score.

    Raises:
        NumericError: With how many were dropped.
    """
    if not any(part.rows.num_rows for part in parts):
        raise NumericError(
            f"iteration {iteration}: a source scored each of the {sum(part.dropped for part in parts)} responses NaN or"
            " infinite, so nothing is left to train on; look at the sources of `rewards`"
        )


def score_metrics(own: Sequence[Measures], replayed: Sequence[Measures], rewards: Iterable[str]) -> dict[str, float]:
    """Return the metrics of data/metrics/score, names and equations as in docs/metrics.md.

    Args:
        own: Of all shards of the iteration's own rows, at least one. Without rows, what is a mean over them is missing.
        replayed: Of all shards of earlier iterations; none where none are replayed.
        rewards: Names of the sources.
    """
    rows = pa.concat_tables([part.rows for part in own])
    metrics: dict[str, float] = {
        "score/responses": rows.num_rows,
        "dropped/nonfinite_score": sum(part.dropped for part in [*own, *replayed]),
        "val/num_eos_tokens": int(np.sum(rows["finish_reason"].to_numpy() == "stop")),
    }
    metrics |= {f"mismatch/{name}": value for name, value in mismatch_of([part.mismatch for part in own]).items()}
    if rows.num_rows:
        metrics["objective/scores"], metrics["objective/scores_std"] = mean_and_std(rows["score"].to_numpy())
        metrics |= source_metrics(rows, rewards, "score/")
        for name in ("objective/kl", "objective/entropy", "objective/full_kl"):
            if name in rows.column_names:
                metrics[name] = token_mean(rows[name].drop_null().to_numpy())
    if replayed:
        measured = mismatch_of([part.mismatch for part in replayed])
        metrics["replay/responses"] = sum(part.rows.num_rows for part in replayed)
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
