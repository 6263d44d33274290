"""The report as one HTML file: it opens without a network, runs no script, and shows text from models as text.

The template (page.html) escapes everything; charts are Markup made by plots.py. A content security policy forbids
scripts and requests, should anything slip through.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from rlhf_core.config import BASE_ITERATION
from rlhf_core.report.health import (
    CLIP_FRACTION_HIGH,
    CLIP_FRACTION_LOW,
    KL_HIGH,
    KL_LOW,
    RATIO_HIGH,
    RATIO_LOW,
    Health,
    health_table,
)
from rlhf_core.report.metrics import CONFIDENCE, RESAMPLES, Evaluation, History
from rlhf_core.report.plots import Point, Series, line_chart, number, path_chart, sparkline
from rlhf_core.seeding import derive_seed
from rlhf_core.text import printable

# How many prompts to read: enough to see a pattern, few enough to be read.
BEST = WORST = 5
RANDOM = 6
# Which prompts are drawn must not change between reruns, and is no part of the experiment.
COMPLETIONS_SEED = 0


@dataclass(frozen=True, slots=True)
class Side:
    """One policy's response to a prompt, and its scores."""

    response: str
    finish_reason: str
    score: float  # of this response
    reward_model: float | None  # None without a reward model
    mean: float  # score over all samples of the prompt


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both policies on one held-out prompt."""

    prompt_id: str
    prompt: str
    gain: float  # difference of the mean scores
    base: Side
    latest: Side


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its caption."""

    title: str
    caption: str
    svg: Markup
    legend: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Curve:
    """Metrics that share one chart over the iterations."""

    title: str
    caption: str
    unit: str
    metrics: dict[str, str]  # name -> label
    from_base: bool = False  # starts at the base model, which has held-out metrics only
    band: tuple[float | None, float | None] | None = None


CURVES = (
    Curve(
        "KL to the reference",
        "Sampled in training (policy before the update) and held-out (after it). Shaded: the usual range.",
        "nats a response",
        {"objective/kl": "training", "eval/kl": "held-out"},
        from_base=True,
        band=(KL_LOW, KL_HIGH),
    ),
    Curve("Training score", "Mean weighted score of the sampled responses.", "score", {"objective/scores": "score"}),
    Curve(
        "Share of finished responses",
        "Responses that the model ended itself.",
        "share",
        {"eval/finished": "held-out"},
        from_base=True,
    ),
    Curve("Entropy", "Sum of -logprobs over a response.", "nats a response", {"objective/entropy": "entropy"}),
    Curve(
        "Tokens clipped",
        "Share of tokens whose ratio the clip stopped. Shaded: the usual range.",
        "share",
        {"policy/clipfrac_avg": "share"},
        band=(CLIP_FRACTION_LOW, CLIP_FRACTION_HIGH),
    ),
    Curve(
        "Probability ratio",
        "Mean of new / old probability over tokens and updates. Shaded: the usual range.",
        "ratio",
        {"val/ratio": "ratio"},
        band=(RATIO_LOW, RATIO_HIGH),
    ),
    Curve(
        "Explained variance of the critic",
        "Before and after the update. 1 is perfect, 0 is no better than the mean.",
        "share of variance",
        {"val/explained_variance": "before", "val/explained_variance_after": "after"},
        band=(0.0, None),
    ),
    Curve("Response length", "Held-out responses.", "tokens", {"eval/response_length_mean": "length"}, from_base=True),
    Curve("Value loss", "Mean over optimiser steps.", "loss", {"loss/value_avg": "loss"}),
)


def render(history: History) -> str:
    """Return the report page.

    Args:
        history: What metrics.read_history returns.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = number
    environment.filters["signed"] = lambda value: f"{value:+.3f}"
    environment.filters["percent"] = lambda value: "–" if value is None else f"{value:.1%}"
    environment.filters["text"] = lambda value: printable(value, keep="\n\t")
    rows = [history.rows[name] for name in history.chain]
    gains = [history.gains[name] for name in history.chain]
    last = history.chain[-1] if history.chain else BASE_ITERATION
    base, latest = history.evaluations[BASE_ITERATION], history.evaluations[last]
    return environment.get_template("page.html").render(
        chain=history.chain,
        last=last,
        base=base,
        latest=latest,
        base_row=history.rows[BASE_ITERATION],
        last_row=history.rows[last],
        gain=history.gains.get(last),
        prompts=len(base.prompt_ids),
        responses=base.table.num_rows,
        resamples=RESAMPLES,
        confidence=f"{CONFIDENCE:.0%}",
        health=[(row, sparkline(row.history)) for row in _health(history, rows, gains)],
        figures=figures(history),
        comparisons=comparisons(base, latest) if history.chain else {},
        reward_model=history.reward_model,
        rows=history.rows,
        previous=history.previous,
        names=list(dict.fromkeys(name for row in history.rows.values() for name in row)),
        lineage=[lineage(history.evaluations[name]) for name in [BASE_ITERATION, *history.chain]],
    )


def _health(history: History, rows: list[Any], gains: list[Any]) -> list[Health]:
    return health_table(rows, history.reward_model, gains) if rows else []


def figures(history: History) -> list[Figure]:
    """Return the charts of the main chain: what was gained, at which distance, and how each update behaved."""
    return [*_outcome(history), *(_over_iterations(history, curve) for curve in CURVES)]


def _outcome(history: History) -> list[Figure]:
    """The gain with its interval and, with a reward model, proxy against true reward in two views."""
    policies = [BASE_ITERATION, *history.chain]
    gains = [history.gains.get(name) for name in policies]
    gain = Series(
        "gain",
        [0.0 if one is None else one.mean for one in gains],
        [None if one is None else one.low for one in gains],
        [None if one is None else one.high for one in gains],
    )
    gained = Figure(
        "Held-out score, gain over the base model",
        f"Mean over prompts with its {CONFIDENCE:.0%} interval (paired bootstrap). 0 is the base model.",
        line_chart(policies, [gain], x_title="iteration", y_title="held-out score", band=(0.0, None)),
    )
    points = [
        Point(one.iteration, float(one.reward_model.mean()), float(one.scores.mean()))
        for one in (history.evaluations[name] for name in policies)
        if one.reward_model is not None
    ]
    if not points:
        return [gained]
    proxy = Series("reward model (proxy)", _standardised(history, "reward_model"))
    true = Series("held-out score (true)", _standardised(history, "scores"))
    return [
        gained,
        Figure(
            "Proxy against true reward, in standard deviations of the base model",
            "Both scores as gain over the base model's mean. Where the reward model goes on rising and the held-out"
            " score does not, the reward model is being exploited.",
            line_chart(policies, [proxy, true], x_title="iteration", y_title="gain, base std"),
            (proxy.label, true.label),
        ),
        Figure(
            "Held-out score against reward model score",
            "One point for each policy, labelled with its iteration. Up and to the right is real progress; right alone"
            " is over-optimisation.",
            path_chart(points, x_title="reward model mean", y_title="held-out score"),
        ),
    ]


def _over_iterations(history: History, curve: Curve) -> Figure:
    policies = [BASE_ITERATION, *history.chain] if curve.from_base else history.chain
    series = [Series(label, [history.rows[key].get(name) for key in policies]) for name, label in curve.metrics.items()]
    svg = line_chart(policies, series, x_title="iteration", y_title=curve.unit, band=curve.band)
    return Figure(curve.title, curve.caption, svg, tuple(curve.metrics.values()) if len(series) > 1 else ())


def comparisons(base: Evaluation, latest: Evaluation) -> dict[str, list[Comparison]]:
    """Choose held-out prompts to read: the best gains, the worst losses, and some at random.

    A prompt's gain is the difference of its mean scores. The response shown is the one whose score is nearest to
    the prompt's mean, so that neither side shows its lucky sample. No prompt is shown twice.

    Args:
        base: Evaluation of the base model.
        latest: Evaluation of the latest policy, of the same prompts in the same order.

    Returns:
        Heading -> comparisons; a heading without any is left out.
    """
    gains = latest.scores - base.scores
    order = np.argsort(-gains, kind="stable")
    best = [int(index) for index in order[:BEST] if gains[index] > 0]
    worst = [int(index) for index in order[::-1][:WORST] if gains[index] < 0]
    rest = [index for index in range(len(gains)) if index not in {*best, *worst}]
    generator = np.random.default_rng(derive_seed(COMPLETIONS_SEED, "report", "completions", latest.iteration))
    drawn = sorted(int(index) for index in generator.permutation(rest)[:RANDOM]) if rest else []
    prompts = plain_prompts(_first_of_each(base, "prompt"))
    sides = (_sides(base), _sides(latest))
    chosen = {"Best gains": best, "Worst losses": worst, "At random": drawn}
    return {
        heading: [
            Comparison(base.prompt_ids[index], prompts[index], float(gains[index]), sides[0][index], sides[1][index])
            for index in indices
        ]
        for heading, indices in chosen.items()
        if indices
    }


def plain_prompts(prompts: Sequence[str]) -> list[str]:
    """Return rendered prompts without what their chat template puts around all of them.

    Whole lines that all prompts begin with are left out, and what all end with from its first line break or bracket on.

    Args:
        prompts: Rendered prompts; with fewer than two, nothing can be told apart and they are returned as they are.
    """
    if len(set(prompts)) < 2:
        return list(prompts)
    start = _common_prefix(prompts).rfind("\n") + 1
    tail = _common_prefix([prompt[start:][::-1] for prompt in prompts])[::-1]
    found = re.search(r"[\n<\[]", tail)
    end = len(tail) - found.start() if found else 0
    return [prompt[start : len(prompt) - end] for prompt in prompts]


def _common_prefix(texts: Sequence[str]) -> str:
    # The first and last in sorted order differ earliest.
    first, last = min(texts), max(texts)
    same = (index for index, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(same, min(len(first), len(last)))]


def lineage(evaluation: Evaluation) -> dict[str, Any]:
    """Return where an evaluation came from, as its Parquet metadata tells: hashes of inputs and settings."""
    metadata = evaluation.metadata
    hashes = {str(name): str(value) for name, value in (metadata.get("inputs") or {}).items()}
    for name in ("policy", "reference", "reward_model", "tokenizer"):
        if metadata.get(name) is not None:
            hashes.setdefault(name, str(metadata[name]))
    hashes |= {f"reward_models/{name}": str(value) for name, value in (metadata.get("reward_models") or {}).items()}
    known = {"inputs", "policy", "reference", "reward_model", "reward_models", "tokenizer", "iteration"}
    settings = {
        name: json.dumps(value, ensure_ascii=False, sort_keys=True)
        for name, value in sorted(metadata.items())
        if name not in known
    }
    return {"iteration": evaluation.iteration, "hashes": hashes, "settings": settings}


def _standardised(history: History, name: str) -> list[float | None]:
    """Gains over the base model's mean in its standard deviation over prompts; None where there is none."""
    base = getattr(history.evaluations[BASE_ITERATION], name)
    policies = [BASE_ITERATION, *history.chain]
    spread = 0.0 if base is None else float(base.std())
    if spread == 0:
        return [None] * len(policies)
    return [float(getattr(history.evaluations[key], name).mean() - base.mean()) / spread for key in policies]


def _first_of_each(evaluation: Evaluation, column: str) -> list[str]:
    """A column's first value for each prompt, in the order of prompt_ids."""
    found: dict[str, str] = {}
    ids, texts = evaluation.table.column("prompt_id").to_pylist(), evaluation.table.column(column).to_pylist()
    for prompt_id, text in zip(ids, texts, strict=True):
        found.setdefault(prompt_id, text)
    return [found[prompt_id] for prompt_id in evaluation.prompt_ids]


def _sides(evaluation: Evaluation) -> list[Side]:
    """For each prompt the sample whose score is nearest to the prompt's mean; the first of equals."""
    means = dict(zip(evaluation.prompt_ids, evaluation.scores.tolist(), strict=True))
    nearest: dict[str, tuple[float, dict[str, Any]]] = {}
    for row in evaluation.table.select(
        ["prompt_id", "response", "finish_reason", "score", "reward_model_score"]
    ).to_pylist():
        distance = abs(row["score"] - means[row["prompt_id"]])
        if row["prompt_id"] not in nearest or distance < nearest[row["prompt_id"]][0]:
            nearest[row["prompt_id"]] = (distance, row)
    rows = [(prompt_id, nearest[prompt_id][1]) for prompt_id in evaluation.prompt_ids]
    return [
        Side(row["response"], row["finish_reason"], row["score"], row["reward_model_score"], means[prompt_id])
        for prompt_id, row in rows
    ]
