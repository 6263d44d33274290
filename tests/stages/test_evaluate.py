"""evaluate without vLLM: samples made here are scored by the policy, the reference, the sources and the reward model.

Mutations that must fail here: the sources of `rewards` instead of evaluate.rewards; a weight left out; the ground truth
lost on its way from data/prompts; sampling again after a source failed; functions imported only after sampling.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.schema import PROMPTS, evaluations_schema
from rlhf_core.artifacts.shards import read_metadata, read_table, shard_name, write_shard
from rlhf_core.config import BASE_ITERATION, load_run
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.report.metrics import held_out_gain, read_evaluation
from rlhf_core.reward.passes import Passes
from rlhf_core.sampling.engine import Sample
from rlhf_core.sampling.rollouts import read_prompts, rollout_table
from stages import evaluate
from tests.tiny_run import POLICY, PROMPT, RESPONSES, change, policy_logprobs, set_rewards, stage, write_policy

RIGHT = {"kind": "last_number", "weight": 1.0, "partial_credit": 0.0}


def evaluations(iteration: str) -> Path:
    return Path(f"data/evaluations/iteration={iteration}")


def metrics(iteration: str) -> dict:
    return json.loads(Path(f"data/metrics/evaluate/{iteration}.json").read_text())


@pytest.fixture
def sampled(project, monkeypatch):
    """Three held-out prompts whose answers are 7, 8 and 9; two responses to each, one row at a time decoded as told."""
    rows = [
        {"prompt_id": f"p{n}", "messages": None, "prompt": "p", "prompt_ids": PROMPT, "ground_truth": str(7 + n),
         "source": "made", "split": "eval"} for n in range(3)
    ]  # fmt: skip
    metadata = {"stage": "ingest", "tokenizer": hash_tokenizer(POLICY / "0")}
    write_shard(Path("data/prompts") / shard_name(0), pa.Table.from_pylist(rows, schema=PROMPTS), PROMPTS, metadata)
    write_policy("1", noise=0.02)
    texts = {BASE_ITERATION: ["It is 7."] + ["text"] * 5, "1": ["7", "7", "8", "text", "9", "0"]}
    calls: list[str] = []

    def sample(prompts, policy, out, metadata, **options):
        if out.is_dir():
            return
        calls.append(metadata["iteration"])
        samples = [Sample(ids, [-0.5] * len(ids), "stop" if ids[-1:] in ([2], [4]) else "length") for ids in RESPONSES]
        pairs = [samples[place : place + 2] for place in (0, 2, 4)]
        decoded = iter(texts[metadata["iteration"]])
        found = read_prompts(prompts, "eval")
        table = rollout_table(metadata["iteration"], found, pairs, lambda ids: next(decoded))
        for shard in range(2):
            write_shard(out / shard_name(shard), table.slice(3 * shard, 3), table.schema, metadata)

    monkeypatch.setattr(evaluate, "sample_held_out", sample)
    return calls


@pytest.mark.parametrize("iteration", ["0", "1"])
def test_samples_are_compared_with_the_reference_and_scored(sampled, monkeypatch, iteration):
    stage(evaluate, monkeypatch, iteration)
    table = read_table(evaluations(iteration))
    assert table.schema.equals(evaluations_schema(["judge"]))
    assert read_metadata(evaluations(iteration))["iteration"] == iteration
    for row, response in zip(table.to_pylist(), RESPONSES, strict=True):
        assert row["logprobs"] == pytest.approx(policy_logprobs(POLICY / iteration, response), abs=1e-4)
        assert row["ref_logprobs"] == pytest.approx(policy_logprobs(POLICY / "0", response), abs=1e-4)
        # Neutral words and no finished sentence, but for "It is 7.", which ended itself.
        assert row["score_judge"] == row["score"] == (0.0 if row["response"] == "It is 7." else -1.0)
    assert metrics(iteration)["eval/responses"] == 6 and (metrics(iteration)["eval/kl"] == 0.0) == (iteration == "0")


def test_the_reward_model_s_score_stands_beside_the_held_out_score(sampled, monkeypatch):
    change("evaluate", rewards={"rm": {"kind": "reward_model", "weight": 2.0, "path": None}})
    stage(evaluate, monkeypatch, "1")
    table = read_table(evaluations("1"))
    assert table["score_rm"].to_pylist() == table["reward_model_score"].to_pylist()
    assert table["score"].to_numpy() == pytest.approx(2 * table["score_rm"].to_numpy(), abs=1e-6)
    proxy = table["reward_model_score"].to_numpy()
    assert metrics("1")["eval/reward_model_mean"] == pytest.approx(np.mean(proxy), abs=1e-6)
    assert read_metadata(evaluations("1"))["reward_models"] == {"rm": hash_path(Path("data/checkpoints/reward_model"))}


def test_without_a_reward_model_an_accuracy_is_the_score_and_its_gain_is_paired_by_prompt(sampled, monkeypatch):
    shutil.rmtree("data/checkpoints/reward_model")
    Path("data/checkpoints/reward_model").mkdir()
    change("ingest", preferences=None)
    set_rewards(short={"kind": "length", "min_tokens": 0, "max_tokens": 9, "falloff_tokens": 1})
    change("evaluate", rewards={"accuracy": RIGHT})
    for iteration in ("0", "1"):
        stage(evaluate, monkeypatch, iteration)
    table = read_table(evaluations("1"))
    assert table["ground_truth"].to_pylist() == ["7", "7", "8", "8", "9", "9"]
    assert table["score_accuracy"].to_pylist() == table["score"].to_pylist() == [1, 1, 1, 0, 1, 0]
    assert table["reward_model_score"].null_count == 6
    # Base: one right answer of six. Iteration 1: four.
    assert metrics("0")["eval/score_mean"] == metrics("0")["eval/score_accuracy_mean"] == pytest.approx(1 / 6)
    assert metrics("1")["eval/score_mean"] == pytest.approx(4 / 6)
    assert metrics("1")["eval/score_std"] == pytest.approx(np.std([1, 1, 1, 0, 1, 0]))
    assert "eval/reward_model_mean" not in metrics("1")
    # Every prompt gains one right answer of two, so every resample has the same mean.
    gain = held_out_gain(read_evaluation(Path("."), "0"), read_evaluation(Path("."), "1"))
    assert (gain.low, gain.mean, gain.high) == pytest.approx((0.5, 0.5, 0.5))


def test_every_source_has_a_column_and_its_weight(sampled, monkeypatch):
    def outcomes(rows, **options):
        return [float(row["response"] == "7") for row in rows], [
            "ok" if row["response"] == "7" else "wrong" for row in rows
        ]

    monkeypatch.setattr("rlhf_core.reward.sources.code_scores", outcomes)
    limits = {"seconds": 1.0, "memory_mb": 64, "disk_mb": 1, "processes": 1, "output_kb": 1, "workers": 3}
    code = {"kind": "code", "weight": 2.0, **limits, "allow_unisolated": True}
    change("evaluate", rewards={"accuracy": {**RIGHT, "weight": -1.0}, "runs": code})
    stage(evaluate, monkeypatch, "1")
    table = read_table(evaluations("1"))
    assert table.schema.equals(evaluations_schema(["accuracy", "runs"], outcomes=["runs"]))
    assert table["score"].to_pylist() == [1, 1, -1, 0, -1, 0]  # 2 * runs - accuracy
    assert metrics("1")["eval/score_runs_ok"] == 2 and metrics("1")["eval/score_runs_wrong"] == 4
    described = read_metadata(evaluations("1"))["rewards"]["runs"]
    assert described["seconds"] == 1.0 and "workers" not in described


def test_a_source_that_fails_stops_before_the_models_and_the_samples_are_kept(sampled, monkeypatch):
    change("evaluate", rewards={"accuracy": {"kind": "exact_answer", "weight": 1.0}})
    with monkeypatch.context() as patched:
        patched.setattr(Passes, "token_logprobs", lambda *a, **k: pytest.fail("a model was loaded"))
        patched.setattr("rlhf_core.reward.answers.exact_answer_score", fails)
        with pytest.raises(DataError, match=r"source accuracy, .*: sample 1-p0-0: ground_truth is odd"):
            stage(evaluate, patched, "1")
    assert not evaluations("1").exists()
    stage(evaluate, monkeypatch, "1")
    assert sampled == ["1"]


def fails(*_):
    raise DataError("ground_truth is odd")


def test_a_function_is_imported_before_anything_is_sampled_and_its_files_are_in_the_lineage(
    sampled, monkeypatch, function
):
    function("return [len(r['response']) for r in rows]")
    source = {"kind": "python", "weight": 1.0, "function": "mine:g"}
    change("evaluate", rewards={"mine": source})
    with pytest.raises(ConfigError, match=r"mine.*has no function g; it has f"):
        stage(evaluate, monkeypatch, "1")
    assert sampled == []
    change("evaluate", rewards={"mine": {**source, "function": "mine:f"}})
    stage(evaluate, monkeypatch, "1")
    assert read_table(evaluations("1"))["score_mine"].to_pylist() == [1, 1, 1, 4, 1, 1]
    assert read_metadata(evaluations("1"))["inputs"]["user_rewards"] == hash_path(Path("user_rewards"))


def test_other_sources_are_another_work_directory(sampled):
    tokenizer = read_metadata(Path("data/prompts"))["tokenizer"]
    found = []
    for weight in (1.0, 2.0):
        change("evaluate", rewards={"accuracy": {**RIGHT, "weight": weight}})
        found.append(evaluate.described("1", POLICY / "1", load_run().params, [2]))
    assert found[0]["tokenizer"] == tokenizer and found[0]["evaluate"].keys() == {
        "max_prompts", "samples_per_prompt", "temperature",
    }  # fmt: skip
    assert found[0] != found[1] and {**found[0], "rewards": None} == {**found[1], "rewards": None}


def test_a_reward_model_that_is_no_directory_is_named_before_anything_is_sampled(sampled, monkeypatch):
    change("evaluate", rewards={"rm": {"kind": "reward_model", "weight": 1.0, "path": "models/none"}})
    with pytest.raises(ModelError, match=r"evaluate\.rewards\.rm\.path is models/none, which is no directory"):
        stage(evaluate, monkeypatch, "1")
    assert sampled == []
