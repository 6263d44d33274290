"""The health table: is each metric where a run that learns has it, where is it heading, and what to change if not.

Pure functions of metric rows. The ranges are constants because they describe PPO, not an experiment; docs/health.md
tells where each comes from. They are rules of thumb: a row outside its range is a reason to look, not a verdict.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlhf_core.report.metrics import Gain, Row

Status = Literal["ok", "low", "high", "watch"]

# nats, sum over a response. Below, the policy has hardly moved; above, it tends to exploit the reward model.
KL_LOW, KL_HIGH = 5.0, 20.0
# Iterations in which a KL below its range is what one expects: it starts at 0 by construction.
KL_EARLY_ITERATIONS = 5
# nats. The KL of a policy is never negative; its estimate is, beyond noise, when samples are not the policy's own.
KL_NEGATIVE = -0.5
# Share of tokens whose ratio the clip stopped.
CLIP_FRACTION_LOW, CLIP_FRACTION_HIGH = 0.10, 0.30
# Mean of new / old probability over tokens.
RATIO_LOW, RATIO_HIGH = 0.9, 1.1
# Relative change of the entropy from one iteration to the next.
ENTROPY_FALL, ENTROPY_RISE = -0.15, 0.15
# Iterations in which a new value head may explain nothing yet.
VALUE_EARLY_ITERATIONS = 2
# nats a token. Sampling in float32 stays below 1e-9, in bfloat16 at about 0.002.
MISMATCH_HIGH = 0.01
# Standard errors that a difference must exceed before it is called one.
SURE = 2.0
# Relative change below which a trend reads as flat.
_FLAT = 0.02


@dataclass(frozen=True, slots=True)
class Health:
    """One row of the health table."""

    metric: str
    meaning: str  # what it is, with its unit
    expected: str  # the range in words
    value: float | None  # at the last iteration; None when it was not measured
    history: tuple[float | None, ...]  # at every iteration, oldest first
    trend: str  # rising, falling, flat; empty with fewer than two values
    status: Status
    note: str  # why this status
    change: str  # what to change; empty when nothing


@dataclass(frozen=True, slots=True)
class Verdict:
    """A status, its reason, and what to change."""

    status: Status
    note: str
    change: str = ""


def health_table(rows: list[Row], reward_model: Row, gains: list[Gain]) -> list[Health]:
    """Return one row for each metric that tells whether a PPO run is well.

    Args:
        rows: Metrics of the iterations of one chain, oldest first; at least one.
        reward_model: Metrics of train_rm.
        gains: Gain of held-out score over the base model with its interval, one for each row.

    Returns:
        Rows in reading order: is it getting better, is it stable, can the numbers be trusted.
    """
    table = [_row(rows, *spec) for spec in _SPECS if spec[0] != "val/explained_variance" or _has_critic(rows)]
    held_out = _column(rows, "eval/score_mean")
    # Held-out rows come first: they are the answer; the others explain it.
    table.insert(
        0,
        _health(
            "eval/score_mean",
            "held-out score",
            "gain over the base model above 0, interval included",
            held_out,
            held_out_verdict(rows, gains),
        ),
    )
    accuracy = reward_model.get("eval/accuracy")
    if reward_model.get("train/pairs") == 0:  # no preferences, so no reward model
        return table
    table.append(
        _health(
            "eval/accuracy",
            "reward model, share of held-out pairs ordered right",
            "above its length baseline",
            [accuracy],
            reward_model_verdict(reward_model),
        )
    )
    return table


def kl_verdict(rows: list[Row]) -> Verdict:
    """Judge objective/kl, nats, mean over responses of the summed k1."""
    value = _last(rows, "objective/kl")
    if value is None:
        return _unmeasured()
    if value < KL_NEGATIVE:
        return Verdict(
            "low",
            "negative beyond noise: the samples are not drawn from the policy that is compared with the reference",
            "Check mismatch/k3; let sampling.dtype go with compute.precision, and use one temperature.",
        )
    if value < KL_LOW and len(rows) <= KL_EARLY_ITERATIONS:
        return Verdict(
            "ok", f"low, as it should be in the first iterations: it starts at 0 and grows towards {KL_LOW:g}"
        )
    if value < KL_LOW:
        return Verdict(
            "low",
            "the policy has hardly moved from the reference",
            "Leave it while scores still rise; otherwise lower advantages.kl_coef, or raise ppo_update.learning_rate"
            " or ppo_epochs.",
        )
    if value > KL_HIGH:
        return Verdict(
            "high",
            "the policy is far from the reference and may be exploiting the reward model: read the completions",
            "Raise advantages.kl_coef, lower ppo_update.learning_rate or ppo_epochs, or roll back: start the next"
            " iteration from an earlier one (prev).",
        )
    return Verdict("ok", "moving, and still near the reference")


def clip_fraction_verdict(rows: list[Row]) -> Verdict:
    """Judge policy/clipfrac_avg, share of tokens."""
    value = _last(rows, "policy/clipfrac_avg")
    if value is None:
        return _unmeasured()
    if value < CLIP_FRACTION_LOW:
        return Verdict(
            "low",
            "updates are timid: few tokens reach the clip range",
            "Raise ppo_update.learning_rate or ppo_epochs, or lower clip_range. Nothing, if scores rise fast enough.",
        )
    if value > CLIP_FRACTION_HIGH:
        return Verdict(
            "high",
            "many tokens hit the clip range: their gradient is lost, and the rest may overshoot",
            "Lower ppo_update.learning_rate or ppo_epochs, or take more responses an iteration (rollout) and larger"
            " minibatches.",
        )
    return Verdict("ok", "the clip works at the edge, not in the middle")


def ratio_verdict(rows: list[Row]) -> Verdict:
    """Judge val/ratio, mean of new / old probability over tokens."""
    value = _last(rows, "val/ratio")
    if value is None:
        return _unmeasured()
    if RATIO_LOW <= value <= RATIO_HIGH:
        return Verdict("ok", "near 1, as an expectation under the old policy must be")
    return Verdict(
        "low" if value < RATIO_LOW else "high",
        "the policy moved too far within one iteration, or logprobs are of another policy or temperature",
        "Lower ppo_update.learning_rate or ppo_epochs; see policy/max_first_ratio_error.",
    )


def entropy_verdict(rows: list[Row]) -> Verdict:
    """Judge the change of objective/entropy, nats, mean over responses of the summed -logprobs."""
    values = [value for value in _column(rows, "objective/entropy") if value is not None]
    if not values:
        return _unmeasured()
    if len(values) < 2:
        return Verdict("watch", "one iteration: a change needs two")
    if values[-2] <= 0:
        return Verdict("low", "zero: every response is certain, nothing is left to explore", _MORE_ENTROPY)
    change = values[-1] / values[-2] - 1
    if change < ENTROPY_FALL:
        return Verdict(
            "low",
            f"fell by {-change:.0%} in one iteration: the policy is collapsing on few responses, or they got shorter"
            " (compare rollout/response_length_mean)",
            _MORE_ENTROPY,
        )
    if change > ENTROPY_RISE:
        return Verdict(
            "high",
            f"rose by {change:.0%} in one iteration: the policy is coming apart, or responses got longer"
            " (compare rollout/response_length_mean)",
            "Lower ppo_update.entropy_coef or learning_rate, or sampling.temperature.",
        )
    return Verdict("ok", f"changed by {change:+.0%} in the last iteration")


_MORE_ENTROPY = "Raise ppo_update.entropy_coef, advantages.kl_coef or sampling.temperature, or lower the learning_rate."


def score_verdict(rows: list[Row]) -> Verdict:
    """Judge the rise of objective/scores from the first iteration, against its standard error.

        SE = sqrt(std_first^2 / n_first + std_last^2 / n_last)

    The standard error takes responses as independent. Samples of one prompt are not quite, so it is a little small.
    """
    places = [place for place, value in enumerate(_column(rows, "objective/scores")) if value is not None]
    values = [value for value in _column(rows, "objective/scores") if value is not None]
    if not values:
        return _unmeasured()
    if len(values) < 2:
        return Verdict("watch", "one iteration: a rise needs two")
    rise, error = values[-1] - values[0], _difference_error(rows[places[0]], rows[places[-1]])
    if rise < -SURE * error:
        return Verdict(
            "low",
            f"fell by {-rise:.3g} since the first iteration",
            "Lower ppo_update.learning_rate; check the weights of rewards and the accuracy of the reward"
            " model; roll back with prev.",
        )
    if rise <= SURE * error:
        return Verdict(
            "watch",
            f"changed by {rise:+.3g} since the first iteration, within its noise",
            "Take more responses an iteration (rollout.prompts_per_iteration), or raise ppo_update.learning_rate.",
        )
    best = max(range(len(values)), key=values.__getitem__)
    if values[best] - values[-1] > SURE * error:
        return Verdict(
            "watch",
            f"up by {rise:.3g} since the first iteration, but below its best at iteration {places[best] + 1} of the"
            " chain",
            "Roll back to the best iteration with prev, and lower ppo_update.learning_rate.",
        )
    return Verdict("ok", f"up by {rise:.3g} since the first iteration (standard error {error:.2g})")


def explained_variance_verdict(rows: list[Row]) -> Verdict:
    """Judge val/explained_variance, share of the variance of the returns that the values predict; at most 1."""
    values = [value for value in _column(rows, "val/explained_variance") if value is not None]
    if not values:
        return _unmeasured()
    if values[-1] <= 0 and len(rows) <= VALUE_EARLY_ITERATIONS:
        return Verdict("watch", "not above 0, which is normal while the value head is new")
    if values[-1] <= 0:
        return Verdict(
            "low",
            "the critic predicts returns worse than their mean does, so advantages are noisy",
            "Raise ppo_update.value_head_learning_rate, value_coef or value_clip_range, or take more responses.",
        )
    if len(values) > 1 and values[-1] < values[-2] and values[-1] < values[0]:
        return Verdict("watch", "above 0, but falling", "If it goes on falling: raise ppo_update.value_coef.")
    return Verdict("ok", "the critic explains part of the returns")


def mismatch_verdict(rows: list[Row]) -> Verdict:
    """Judge mismatch/k3, nats a token, between the sampler and the trainer on the same policy."""
    value = _last(rows, "mismatch/k3")
    if value is None:
        return _unmeasured()
    if value > MISMATCH_HIGH:
        return Verdict(
            "high",
            "sampler and trainer disagree about the same policy, which biases every ratio",
            "Let sampling.dtype go with compute.precision (docs/parameters.md, Rounding); check the temperature.",
        )
    return Verdict("ok", "sampler and trainer agree")


def held_out_verdict(rows: list[Row], gains: list[Gain]) -> Verdict:
    """Judge the held-out gain over the base model, and whether the reward model saw it the same way."""
    if not gains:
        return _unmeasured()
    gain = gains[-1]
    text = f"gain {gain.mean:+.3f}, 95% interval {gain.low:+.3f} to {gain.high:+.3f}"
    proxy = [value for value in _column(rows, "eval/reward_model_mean") if value is not None]
    rising = len(proxy) > 1 and proxy[-1] > proxy[0]
    if gain.high < 0:
        return Verdict(
            "low",
            text
            + (": the reward model's score rises while this one falls, so it is being exploited" if rising else ""),
            "Raise advantages.kl_coef, roll back with prev, or bring rewards nearer to evaluate.rewards: a reward model"
            " by more and newer pairs.",
        )
    if gain.low <= 0:
        return Verdict(
            "watch", text + ": not told apart from noise yet", "More iterations, or more evaluate.max_prompts."
        )
    best = max(range(len(gains)), key=lambda index: gains[index].mean)
    if gains[best].low > gain.mean:
        return Verdict(
            "watch",
            text
            + f": below iteration {best + 1} of the chain ({gains[best].mean:+.3f})"
            + (", while the reward model's score rises: over-optimisation" if rising else ""),
            "Roll back to the best iteration with prev; raise advantages.kl_coef.",
        )
    return Verdict("ok", text)


def reward_model_verdict(reward_model: Row) -> Verdict:
    """Judge eval/accuracy against eval/length_baseline_accuracy, with the standard error of a share.

    SE = sqrt(p (1 - p) / pairs)
    """
    accuracy, baseline = reward_model.get("eval/accuracy"), reward_model.get("eval/length_baseline_accuracy")
    pairs = reward_model.get("eval/pairs")
    if accuracy is None or baseline is None or not pairs:
        return _unmeasured()
    error = math.sqrt(accuracy * (1 - accuracy) / pairs)
    text = f"{accuracy:.1%} against {baseline:.1%} by length alone, on {pairs:.0f} pairs"
    better = "More or cleaner pairs, more train_rm.epochs, fewer frozen_layers; a higher learning_rate."
    if accuracy <= baseline:
        return Verdict("low", text + ": PPO would optimise little more than length", better)
    if accuracy <= baseline + SURE * error:
        return Verdict("watch", text + ": not told apart from it yet", better)
    return Verdict("ok", text)


_SPECS: list[tuple[str, str, str, Callable[[list[Row]], Verdict]]] = [
    ("objective/scores", "mean score of the sampled responses", "rising", score_verdict),
    (
        "objective/kl",
        "KL to the reference, nats a response",
        f"{KL_LOW:g} to {KL_HIGH:g}; lower in the first iterations",
        kl_verdict,
    ),
    (
        "policy/clipfrac_avg",
        "share of tokens clipped",
        f"{CLIP_FRACTION_LOW:.2f} to {CLIP_FRACTION_HIGH:.2f}",
        clip_fraction_verdict,
    ),
    ("val/ratio", "mean of new / old probability", f"{RATIO_LOW:g} to {RATIO_HIGH:g}", ratio_verdict),
    (
        "objective/entropy",
        "entropy, nats a response",
        f"falling gently: {ENTROPY_FALL:.0%} to {ENTROPY_RISE:+.0%} an iteration",
        entropy_verdict,
    ),
    (
        "val/explained_variance",
        "share of the returns' variance that the critic predicts",
        "above 0, rising",
        explained_variance_verdict,
    ),
    ("mismatch/k3", "sampler against trainer, nats a token", f"below {MISMATCH_HIGH:g}", mismatch_verdict),
]


def trend(history: list[float | None]) -> str:
    """Return the direction over the iterations in one word: rising, falling or flat; "" with fewer than two values."""
    values = [value for value in history if value is not None]
    if len(values) < 2:
        return ""
    change = values[-1] - values[0]
    scale = max(abs(value) for value in values)
    if scale == 0 or abs(change) <= _FLAT * scale:
        return "flat"
    return "rising" if change > 0 else "falling"


def _row(rows: list[Row], metric: str, meaning: str, expected: str, verdict: Callable[[list[Row]], Verdict]) -> Health:
    return _health(metric, meaning, expected, _column(rows, metric), verdict(rows))


def _health(metric: str, meaning: str, expected: str, history: list[float | None], verdict: Verdict) -> Health:
    value = history[-1] if history else None
    return Health(
        metric, meaning, expected, value, tuple(history), trend(history), verdict.status, verdict.note, verdict.change
    )


def _column(rows: list[Row], metric: str) -> list[float | None]:
    return [row.get(metric) for row in rows]


def _has_critic(rows: list[Row]) -> bool:
    """False where advantages were estimated, but never with values."""
    estimated = [row for row in rows if "advantages/tokens" in row]
    return not estimated or any("val/explained_variance" in row for row in estimated)


def _last(rows: list[Row], metric: str) -> float | None:
    return rows[-1].get(metric) if rows else None


def _difference_error(first: Row, last: Row) -> float:
    """Standard error of the difference of two means, 0 where spread or count is not known."""
    total = 0.0
    for row in (first, last):
        spread, count = row.get("objective/scores_std"), row.get("score/responses")
        if spread is not None and count:
            total += spread * spread / count
    return math.sqrt(total)


def _unmeasured() -> Verdict:
    return Verdict("watch", "not measured")
