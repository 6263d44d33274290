"""Each row of the health table: inside its range, below, above, too early to tell, not measured."""

import re
from pathlib import Path

import pytest

from rlhf_core.config import Params
from rlhf_core.report import health
from rlhf_core.report.health import Verdict
from rlhf_core.report.metrics import Gain, Row


def rows(metric: str, *values: float | None, **more: float) -> list[Row]:
    return [{metric: value, **more} for value in values]


@pytest.mark.parametrize(
    "values, status, words",
    [
        ([0.0], "ok", "first iterations"),
        ([0.0, 1.0, 2.0, 3.0, 4.9], "ok", "first iterations"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 4.9], "low", "hardly moved"),
        ([0.0, 5.0], "ok", "near the reference"),
        ([0.0, 20.0], "ok", "near the reference"),
        ([0.0, 20.1], "high", "exploiting"),
        ([-0.4], "ok", "first iterations"),  # noise of an estimate around 0
        ([-0.6], "low", "negative"),
        ([None], "watch", "not measured"),
    ],
)
def test_kl(values: list[float | None], status: str, words: str) -> None:
    verdict = health.kl_verdict(rows("objective/kl", *values))
    assert verdict.status == status
    assert words in verdict.note


@pytest.mark.parametrize(
    "verdict, metric, low, high",
    [
        (health.clip_fraction_verdict, "policy/clipfrac_avg", 0.10, 0.30),
        (health.ratio_verdict, "val/ratio", 0.9, 1.1),
    ],
)
def test_ranges_include_their_ends(verdict: object, metric: str, low: float, high: float) -> None:
    def status(value: float | None) -> Verdict:
        return verdict(rows(metric, value))  # type: ignore[operator]

    assert [status(value).status for value in (low - 1e-6, low, high, high + 1e-6)] == ["low", "ok", "ok", "high"]
    assert status(None) == Verdict("watch", "not measured")
    assert "learning_rate" in status(high + 1).change
    assert status(low).change == ""


@pytest.mark.parametrize(
    "values, status",
    [
        ([30.0], "watch"),  # a change needs two
        ([40.0, 36.0], "ok"),  # -10 %
        ([40.0, 33.9], "low"),  # -15.25 %
        ([40.0, 45.9], "ok"),  # +14.75 %
        ([40.0, 46.1], "high"),  # +15.25 %
        ([80.0, 40.0, 39.0], "ok"),  # only the last change counts
        ([0.0, 0.0], "low"),
    ],
)
def test_entropy(values: list[float], status: str) -> None:
    assert health.entropy_verdict(rows("objective/entropy", *values)).status == status


# Standard error of the difference with std 1 and 200 responses each: sqrt(1/200 + 1/200) = 0.1; two of them 0.2.
@pytest.mark.parametrize(
    "values, status",
    [
        ([0.0], "watch"),
        ([0.0, 0.21], "ok"),
        ([0.0, 0.19], "watch"),
        ([0.0, -0.19], "watch"),
        ([0.0, -0.21], "low"),
        ([0.0, 0.8, 0.5], "watch"),  # risen, but 0.3 below its best
        ([0.0, 0.8, 0.7], "ok"),
    ],
)
def test_scores_rise_beyond_their_noise(values: list[float], status: str) -> None:
    history = rows("objective/scores", *values, **{"objective/scores_std": 1.0, "score/responses": 200})
    assert health.score_verdict(history).status == status


def test_scores_skip_iterations_that_sampled_nothing() -> None:
    # The second and fourth only replayed: no score of their own. 0.8 at iteration 3, 0.5 at 5: 0.3 below its best.
    history = rows("objective/scores", 0.0, 9.0, 0.8, 9.0, 0.5, **{"objective/scores_std": 1.0, "score/responses": 200})
    for row in (history[1], history[3]):
        del row["objective/scores"], row["objective/scores_std"]
        row["score/responses"] = 0
    verdict = health.score_verdict(history)
    assert verdict.status == "watch" and "below its best at iteration 3 of the chain" in verdict.note


@pytest.mark.parametrize(
    "values, status, words",
    [
        ([-0.5], "watch", "normal while the value head is new"),
        ([-0.5, -0.1], "watch", "normal"),
        ([-0.5, -0.1, 0.0], "low", "worse than their mean"),
        ([0.2], "ok", "explains part"),
        ([0.4, 0.5, 0.3], "watch", "falling"),
        ([0.1, 0.5, 0.3], "ok", "explains part"),
    ],
)
def test_explained_variance(values: list[float], status: str, words: str) -> None:
    verdict = health.explained_variance_verdict(rows("val/explained_variance", *values))
    assert verdict.status == status
    assert words in verdict.note


def test_mismatch() -> None:
    assert health.mismatch_verdict(rows("mismatch/k3", 0.002)).status == "ok"
    assert health.mismatch_verdict(rows("mismatch/k3", 0.011)).status == "high"


# Standard error at 64 %: sqrt(0.64 * 0.36 / 100) = 0.048; two of them 0.096.
@pytest.mark.parametrize("baseline, status", [(0.53, "ok"), (0.55, "watch"), (0.64, "low"), (0.70, "low")])
def test_reward_model_against_length(baseline: float, status: str) -> None:
    found = {"eval/accuracy": 0.64, "eval/length_baseline_accuracy": baseline, "eval/pairs": 100}
    assert health.reward_model_verdict(found).status == status


@pytest.mark.parametrize(
    "gains, proxy, status, words",
    [
        ([Gain(0.2, 0.1, 0.3)], [0.0], "ok", "gain +0.200"),
        ([Gain(0.2, -0.1, 0.5)], [0.0], "watch", "not told apart from noise"),
        ([Gain(-0.2, -0.3, -0.1)], [0.0], "low", "interval -0.300 to -0.100"),
        ([Gain(0.1, 0.0, 0.2), Gain(-0.2, -0.3, -0.1)], [0.0, 1.0], "low", "being exploited"),
        ([Gain(0.6, 0.5, 0.7), Gain(0.2, 0.1, 0.3)], [0.0, 1.0], "watch", "over-optimisation"),
        ([Gain(0.6, 0.5, 0.7), Gain(0.2, 0.1, 0.3)], [1.0, 0.0], "watch", "below iteration 1"),
    ],
)
def test_held_out_gain(gains: list[Gain], proxy: list[float], status: str, words: str) -> None:
    verdict = health.held_out_verdict(rows("eval/reward_model_mean", *proxy), gains)
    assert verdict.status == status
    assert words in verdict.note


@pytest.mark.parametrize(
    "values, word",
    [
        ([1.0], ""),
        ([None, 2.0], ""),
        ([1.0, 2.0], "rising"),
        ([2.0, None, 1.0], "falling"),
        ([100.0, 101.0], "flat"),
        ([0.0, 0.0], "flat"),
    ],
)
def test_trend(values: list[float | None], word: str) -> None:
    assert health.trend(values) == word


def test_table_has_every_row_and_advice_only_where_something_is_wrong() -> None:
    row: Row = {
        "objective/scores": 0.1, "objective/kl": 0.0, "policy/clipfrac_avg": 0.5, "val/ratio": 1.0,
        "objective/entropy": 30.0, "val/explained_variance": 0.1, "mismatch/k3": 0.0, "eval/score_mean": 0.3,
    }  # fmt: skip
    table = health.health_table([row], {}, [Gain(0.1, 0.05, 0.2)])
    assert [entry.metric for entry in table] == [
        "eval/score_mean", "objective/scores", "objective/kl", "policy/clipfrac_avg", "val/ratio", "objective/entropy",
        "val/explained_variance", "mismatch/k3", "eval/accuracy",
    ]  # fmt: skip
    assert {entry.status for entry in table} == {"ok", "watch", "high"}
    assert all(entry.change for entry in table if entry.status in ("low", "high"))
    assert not any(entry.change for entry in table if entry.status == "ok")


def test_without_preferences_there_is_no_reward_model_to_judge() -> None:
    table = health.health_table([{}], {"train/pairs": 0}, [])
    assert "eval/accuracy" not in [entry.metric for entry in table]
    assert {entry.status for entry in table} == {"watch"}  # nothing was measured


def test_advice_names_parameters_that_exist() -> None:
    text = Path(health.__file__).read_text(encoding="utf-8")
    sections = {name: field.annotation for name, field in Params.model_fields.items() if name != "seed"}
    used = re.findall(rf"\b({'|'.join(sections)})\.([a-z_0-9]+)", text)
    assert len(set(used)) > 10
    assert [name for section, name in used if name not in sections[section].model_fields] == []  # type: ignore[union-attr]


def test_without_a_critic_there_is_none_to_judge() -> None:
    metrics = [entry.metric for entry in health.health_table([{"advantages/tokens": 800}], {}, [])]
    assert "val/explained_variance" not in metrics and "objective/scores" in metrics
