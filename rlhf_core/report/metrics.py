"""Metrics over iterations: read the JSON files of the stages, compare evaluations, and say how sure a gain is.

An iteration's training metrics (rollout, score, advantages, ppo_update) describe the policy it started from and the
update it made; its evaluation describes the policy it ended with. Left out: what a metric means (docs/metrics.md).
"""

import csv
import io
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.artifacts.shards import read_metadata, read_table
from rlhf_core.config import BASE_ITERATION, Run
from rlhf_core.errors import ArtifactError, RowMismatch
from rlhf_core.seeding import derive_seed

Row = dict[str, float | None]

STAGES = ("rollout", "score", "advantages", "ppo_update", "evaluate")
EVALUATION_COLUMNS = [
    "sample_id",
    "prompt_id",
    "sample_index",
    "prompt",
    "response",
    "finish_reason",
    "score",
    "reward_model_score",
]

# With 10,000 resamples the ends of a 95% interval have a standard error of 0.7 % of its width.
RESAMPLES = 10_000
CONFIDENCE = 0.95
# The seed of the resampling is fixed: it is no part of the experiment, and reruns must give the same bytes.
BOOTSTRAP_SEED = 0
# Numbers drawn at once: 8 MB of indices, whatever the number of prompts.
_BLOCK = 1_000_000


@dataclass(frozen=True, slots=True)
class Gain:
    """A mean difference with its confidence interval, in the unit of the score."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out responses of one policy, with the scores of each prompt averaged over its samples."""

    iteration: str
    table: pa.Table
    metadata: dict[str, Any]
    prompt_ids: tuple[str, ...]
    scores: np.ndarray  # [P] float64, mean score of each prompt
    reward_model: np.ndarray | None  # [P] float64, mean reward model score of each prompt; None without one


@dataclass(frozen=True, slots=True)
class History:
    """All that the report shows: metrics of every iteration, and the evaluations of the main chain."""

    chain: list[str]  # the iterations that lead to the last entry of iterations.yaml, oldest first
    rows: dict[str, Row]  # "0" (evaluation of the base model only) and every iteration
    previous: dict[str, str]  # iteration -> the iteration it starts from
    reward_model: Row
    evaluations: dict[str, Evaluation]  # "0" and the chain
    gains: dict[str, Gain]  # of each iteration of the chain over the base model, held-out score


def read_history(run: Run, root: Path) -> History:
    """Read all metrics and the main chain's evaluations.

    The main chain leads to the last entry of iterations.yaml; other entries are branches, listed but not compared.

    Args:
        run: The checked params.yaml and iterations.yaml.
        root: Project directory, which holds data/.

    Raises:
        ArtifactError: If a file is missing or is not what a stage writes.
    """
    chain = main_chain(run)
    rows = {name: read_row(root, name) for name in [BASE_ITERATION, *run.iterations]}
    evaluations = {name: read_evaluation(root, name) for name in [BASE_ITERATION, *chain]}
    base = evaluations[BASE_ITERATION]
    gains = {name: held_out_gain(base, evaluations[name]) for name in chain}
    for name, gain in gains.items():
        rows[name] |= {"eval/score_gain": gain.mean, "eval/score_gain_low": gain.low, "eval/score_gain_high": gain.high}
    return History(
        chain=chain,
        rows=rows,
        previous={name: iteration.prev for name, iteration in run.iterations.items()},
        reward_model=read_json(root / "data/metrics/train_rm.json"),
        evaluations=evaluations,
        gains=gains,
    )


def main_chain(run: Run) -> list[str]:
    """Return the iterations that lead to the last entry of iterations.yaml, oldest first; [] when there are none."""
    return run.chain(list(run.iterations)[-1]) if run.iterations else []


def chain_rows(run: Run, root: Path) -> dict[str, Row]:
    """Return the metrics of the base model and of the main chain, oldest first."""
    return {name: read_row(root, name) for name in [BASE_ITERATION, *main_chain(run)]}


def read_row(root: Path, iteration: str) -> Row:
    """Return all metrics of one iteration under their names, stages in graph order.

    Args:
        root: Project directory.
        iteration: Its name; "0" is the base model, which has an evaluation only.

    Raises:
        ArtifactError: If a file is missing or malformed, or two stages write the same name.
    """
    row: Row = {}
    for stage in STAGES if iteration != BASE_ITERATION else ("evaluate",):
        path = root / f"data/metrics/{stage}/{iteration}.json"
        found = read_json(path)
        if repeated := sorted(found.keys() & row.keys()):
            raise ArtifactError(
                f"{path}: {', '.join(repeated)} is also a metric of an earlier stage; names must differ"
            )
        row |= found
    return row


def read_json(path: Path) -> Row:
    """Read one flat metric file; null stands for a number that is not defined.

    Raises:
        ArtifactError: If the file is missing, is not JSON, or holds anything but finite numbers and nulls.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; run `dvc repro`, which writes it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not JSON: {error}; delete it and run `dvc repro`") from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: expected one JSON object, found {type(content).__name__}")
    for name, value in content.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value)):
            raise ArtifactError(f"{path}: {name} is {value!r}; expected a finite number or null")
    return content


def read_evaluation(root: Path, iteration: str) -> Evaluation:
    """Read one policy's held-out responses and average the scores of each prompt.

    Raises:
        ArtifactError: If the artifact is missing, malformed or has no rows.
    """
    directory = root / f"data/evaluations/iteration={iteration}"
    table = read_table(directory, EVALUATION_COLUMNS)
    if table.num_rows == 0:
        raise ArtifactError(f"{directory}: no rows; expected at least one held-out response")
    names, scores = prompt_means(table, "score")
    # Null in every row where no reward model was trained.
    has_reward_model = table.column("reward_model_score").null_count == 0
    reward_model = prompt_means(table, "reward_model_score")[1] if has_reward_model else None
    return Evaluation(iteration, table, read_metadata(directory), names, scores, reward_model)


def prompt_means(table: pa.Table, column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return each prompt's mean score over its samples, prompts in order of first appearance.

    Args:
        table: Rows with prompt_id and the column, [B].
        column: A float column without nulls.

    Returns:
        (prompt ids, means [P] float64).
    """
    names, inverse = np.unique(table.column("prompt_id").to_numpy(), return_inverse=True)
    scores = table.column(column).to_numpy().astype(np.float64)
    means = np.bincount(inverse, weights=scores) / np.bincount(inverse)
    first = np.full(len(names), len(inverse))
    np.minimum.at(first, inverse, np.arange(len(inverse)))
    order = np.argsort(first)
    return tuple(str(name) for name in names[order]), means[order]


def held_out_gain(base: Evaluation, policy: Evaluation) -> Gain:
    """Return the gain of held-out score over the base model, paired by prompt.

    Raises:
        RowMismatch: If the two evaluations are not of the same prompts.
    """
    if base.prompt_ids != policy.prompt_ids:
        differing = sorted(set(base.prompt_ids) ^ set(policy.prompt_ids))
        found = f"{differing[0]} and {len(differing) - 1} more differ" if differing else "their order differs"
        raise RowMismatch(
            f"evaluations of {base.iteration!r} and {policy.iteration!r} have different prompts ({found}); "
            "run `dvc repro`, which evaluates all on the same ones"
        )
    seed = derive_seed(BOOTSTRAP_SEED, "report", "bootstrap", policy.iteration)
    return paired_gain(base.scores, policy.scores, seed=seed, resamples=RESAMPLES, confidence=CONFIDENCE)


def paired_gain(base: np.ndarray, policy: np.ndarray, *, seed: int, resamples: int, confidence: float) -> Gain:
    """Return mean(policy - base) with a percentile bootstrap interval over pairs.

    The pairs are resampled with replacement, so differences between prompts cancel and only the variation of the gain
    counts. Samples of one prompt are no independent evidence; average them before.

    Args:
        base: [P] float64, one number for each prompt.
        policy: [P] float64, the same prompts in the same order.
        seed: Of the resampling.
        resamples: How many means the interval is taken from.
        confidence: Share of them inside the interval.

    Returns:
        Mean and interval, in the unit of the inputs.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (percentile interval).
    """
    differences = np.asarray(policy, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    generator = np.random.default_rng(seed)
    prompts = len(differences)
    block = max(1, _BLOCK // prompts)
    means = [
        differences[generator.integers(0, prompts, size=(min(block, resamples - start), prompts))].mean(axis=1)
        for start in range(0, resamples, block)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Gain(float(differences.mean()), float(low), float(high))


def summary(history: History) -> dict[str, float]:
    """Return what `dvc metrics show` and `dvc exp show` print in one line: the last iteration and its gain.

    Returns:
        Every metric of the last iteration of the main chain, the gain of held-out score over the base model with its
        interval, eval/score_base, eval/score_final, and the number of iterations on the chain.
    """
    last = history.chain[-1] if history.chain else BASE_ITERATION
    content = {name: value for name, value in history.rows[last].items() if value is not None}
    return content | {
        "iterations": len(history.chain),
        "eval/score_base": float(history.evaluations[BASE_ITERATION].scores.mean()),
        "eval/score_final": float(history.evaluations[last].scores.mean()),
    }


def iterations_csv(history: History) -> str:
    """Return one CSV line for each iteration (branches too): iteration, prev, then every metric in graph order."""
    names = list(dict.fromkeys(name for key, row in history.rows.items() if key != BASE_ITERATION for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["iteration", "prev", *names])
    for iteration, prev in history.previous.items():
        row = history.rows[iteration]
        writer.writerow([iteration, prev, *("" if row.get(name) is None else row[name] for name in names)])
    return text.getvalue()


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all: temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
