"""Reading metric files, pairing by prompt, and the bootstrap interval."""

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rlhf_core.config import load_run
from rlhf_core.errors import ArtifactError, RowMismatch
from rlhf_core.report.metrics import (
    iterations_csv,
    main_chain,
    paired_gain,
    prompt_means,
    read_history,
    read_json,
    read_row,
    summary,
)
from tests.fake_run import build


def gain(
    base: list[float], policy: list[float], *, seed: int = 1, resamples: int = 10_000
) -> tuple[float, float, float]:
    found = paired_gain(np.array(base), np.array(policy), seed=seed, resamples=resamples, confidence=0.95)
    return found.mean, found.low, found.high


def test_two_prompts_have_the_interval_of_their_four_resamples() -> None:
    # Differences 0 and 1: the means of the four equally likely resamples are 0, 1/2, 1/2, 1; so 2.5% is 0, 97.5% is 1.
    assert gain([2.0, 5.0], [2.0, 6.0]) == (0.5, 0.0, 1.0)


def test_differences_between_prompts_cancel_in_pairs() -> None:
    # Prompts far apart, all raised by 0.25: an unpaired interval would span hundreds, a paired one has no width.
    base = [0.0, 1000.0, -400.0, 64.0]
    assert gain(base, [value + 0.25 for value in base]) == (0.25, 0.25, 0.25)


def test_interval_agrees_with_the_normal_one_on_many_prompts() -> None:
    differences = np.random.default_rng(3).normal(0.1, 0.5, size=2000)
    mean, low, high = gain([0.0] * 2000, list(differences))
    error = differences.std() / math.sqrt(2000)  # analytic standard error 0.011
    assert mean == pytest.approx(differences.mean(), abs=1e-12)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.06 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.06 * error)


def test_interval_is_a_function_of_the_seed() -> None:
    base, policy = [0.0] * 9, [0.1, 0.9, -0.4, 0.3, 0.2, 0.8, -0.1, 0.5, 0.0]
    assert gain(base, policy, resamples=99) == gain(base, policy, resamples=99)
    assert gain(base, policy, resamples=99) != gain(base, policy, resamples=99, seed=2)


def test_samples_of_a_prompt_are_averaged_in_order_of_appearance() -> None:
    # z: (1 + 2 + 3) / 3 = 2; a: (-1 + 0) / 2 = -0.5. "z" comes first although it sorts last.
    table = pa.table({"prompt_id": ["z", "a", "z", "z", "a"], "score": pa.array([1, -1, 2, 3, 0], pa.float32())})
    names, means = prompt_means(table, "score")
    assert names == ("z", "a")
    assert means.tolist() == [2.0, -0.5]


def test_main_chain_leads_to_the_last_entry(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=2, samples=1)
    text = (root / "iterations.yaml").read_text()
    (root / "iterations.yaml").write_text(
        text + '  "4": {prev: "1", rollout: {}, score: {}, advantages: {}, ppo_update: {}}\n'
    )
    assert main_chain(load_run(root)) == ["1", "4"]


def test_summary_and_csv_of_a_run(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=4, samples=2)
    history = read_history(load_run(root), root)
    found = summary(history)
    last = json.loads((root / "data/metrics/score/3.json").read_text())
    assert found["objective/kl"] == last["objective/kl"]
    assert found["iterations"] == 3
    # eval/score_mean averages responses, score_base and score_final prompts; the same with equal samples a prompt.
    base = json.loads((root / "data/metrics/evaluate/0.json").read_text())["eval/score_mean"]
    assert found["eval/score_base"] == pytest.approx(base, abs=1e-6)
    assert found["eval/score_final"] - found["eval/score_base"] == pytest.approx(found["eval/score_gain"], abs=1e-12)
    assert found["eval/score_gain_low"] < found["eval/score_gain"] < found["eval/score_gain_high"]
    rows = list(csv.DictReader(io.StringIO(iterations_csv(history))))
    assert [row["iteration"] for row in rows] == ["1", "2", "3"]
    assert [row["prev"] for row in rows] == ["0", "1", "2"]
    assert float(rows[2]["objective/kl"]) == last["objective/kl"]
    assert float(rows[2]["eval/score_gain"]) == found["eval/score_gain"]
    assert next(iter(rows[0])) == "iteration"


def test_without_iterations_only_the_base_model_is_summarised(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=2, samples=1)
    (root / "iterations.yaml").write_text("iterations: {}\n")
    found = summary(read_history(load_run(root), root))
    assert found["iterations"] == 0
    assert found["eval/score_base"] == found["eval/score_final"]
    assert "eval/score_gain" not in found


def test_missing_metric_file_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=2, samples=1)
    (root / "data/metrics/score/2.json").unlink()
    with pytest.raises(ArtifactError, match=r"score/2\.json: no such file; run `dvc repro`"):
        read_row(root, "2")


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not JSON"),
        ("[1]", "expected one JSON object, found list"),
        ('{"a": NaN}', "a is nan; expected a finite number"),
        ('{"a": "1"}', "a is '1'; expected a finite number"),
        ('{"a": true}', "a is True; expected a finite number"),
    ],
)
def test_malformed_metric_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "1.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=words):
        read_json(path)


def test_null_is_a_number_that_is_not_defined(tmp_path: Path) -> None:
    path = tmp_path / "1.json"
    path.write_text('{"a": null, "b": 2}')
    assert read_json(path) == {"a": None, "b": 2}


def test_one_name_written_by_two_stages_is_refused(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=2, samples=1, overrides={"ppo_update/1": {"objective/kl": 3.0}})
    with pytest.raises(ArtifactError, match="objective/kl is also a metric of an earlier stage"):
        read_row(root, "1")


def test_evaluations_of_other_prompts_are_not_compared(tmp_path: Path) -> None:
    root, other = build(tmp_path / "a", prompts=3, samples=1), build(tmp_path / "b", prompts=4, samples=1)
    shard = "data/evaluations/iteration=2/part-00000.parquet"
    (root / shard).write_bytes((other / shard).read_bytes())
    with pytest.raises(RowMismatch, match=r"'0' and '2' have different prompts \(eval003"):
        read_history(load_run(root), root)
