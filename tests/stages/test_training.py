"""score, advantages, ppo_update and train_rm on a tiny model and rollouts that it really sampled (without vLLM).

Mutations that must fail here: critic of another policy accepted; gate on the mismatch dropped; passes started again
after a crash; empty responses crash the update; scores not normalised.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.schema import PREFERENCES
from rlhf_core.artifacts.shards import read_metadata, read_table, shard_name, write_shard
from rlhf_core.errors import ModelError, NumericError, StaleInput
from stages import advantages, ppo_update, score, train_rm
from tests.tiny_run import RESPONSES, change, policy_logprobs, set_rewards, stage, write_rollouts


def test_one_iteration_from_rollouts_to_a_checkpoint(project, monkeypatch):
    stage(score, monkeypatch, "1", "0")
    table = read_table(Path("data/scores/iteration=1"))
    expected = [policy_logprobs(Path("data/checkpoints/policy/0"), response) for response in RESPONSES]
    for row, response in zip(table.to_pylist(), expected, strict=True):
        assert row["logprobs"] == pytest.approx(response, abs=1e-4)
        assert row["ref_logprobs"] == row["logprobs"]  # iteration 1's policy is the reference
        assert row["values"] == [0.0] * len(response)  # the value head starts at 0
        assert row["bootstrap_value"] == 0.0
        assert row["score"] == row["score_reward_model"]
    metrics = json.loads(Path("data/metrics/score/1.json").read_text())
    assert metrics["mismatch/max_abs"] < 1e-4 and metrics["objective/kl"] == 0.0
    assert metrics["val/num_eos_tokens"] == 3

    stage(advantages, monkeypatch, "1", "0")
    stage(ppo_update, monkeypatch, "1", "0")
    found = json.loads(Path("data/metrics/ppo_update/1.json").read_text())
    assert found["optimizer_steps"] == 4  # 5 responses with tokens in minibatches of 3 and 2, two epochs
    assert found["episode"] == 6  # the empty response counts as sampled
    assert found["policy/max_first_ratio_error"] < 1e-4
    assert len(Path("data/plots/ppo_update/1.csv").read_text().splitlines()) == 5
    before, after = (
        AutoModelForCausalLM.from_pretrained(f"data/checkpoints/policy/{name}").get_input_embeddings().weight
        for name in ("0", "1")
    )
    assert not torch.equal(before, after)
    assert hash_tokenizer(Path("data/checkpoints/policy/1")) == hash_tokenizer(Path("data/checkpoints/policy/0"))
    assert "iteration 0's policy" in Path("data/checkpoints/policy/1/README.md").read_text()


def test_stages_write_the_same_bytes_twice(project, monkeypatch):
    hashes = []
    for _ in range(2):
        stage(score, monkeypatch, "1", "0")
        stage(advantages, monkeypatch, "1", "0")
        stage(ppo_update, monkeypatch, "1", "0")
        hashes.append([hash_path(Path(f"data/{name}")) for name in ("scores", "advantages", "checkpoints", "metrics")])
    assert hashes[0] == hashes[1]


def test_reward_model_scores_are_normalised(project, monkeypatch):
    stage(score, monkeypatch, "1", "0")
    plain = read_table(Path("data/scores/iteration=1"))["score_reward_model"].to_numpy()
    path = Path("data/checkpoints/reward_model/score_normalisation.json")
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "mean": described["mean"] - 3 * described["std"]}))
    path.with_name("lineage.json").unlink()  # the change is meant
    stage(score, monkeypatch, "1", "0")
    shifted = read_table(Path("data/scores/iteration=1"))["score_reward_model"].to_numpy()
    assert shifted - plain == pytest.approx(np.full(6, 3.0), abs=1e-4)


def test_the_score_is_the_weighted_sum_of_its_sources(project, monkeypatch):
    trained = {"kind": "reward_model", "path": None, "weight": 0.5}
    set_rewards(reward_model=trained, judge={"kind": "judge", "weight": 2.0})
    stage(score, monkeypatch, "1", "0")
    for row in read_table(Path("data/scores/iteration=1")).to_pylist():
        assert row["score_judge"] == -1.0  # "text" is neutral and no finished sentence
        assert row["score"] == pytest.approx(0.5 * row["score_reward_model"] - 2.0, abs=1e-6)


def test_a_sampler_that_disagrees_with_the_trainer_stops_the_stage(project, monkeypatch):
    write_rollouts(shift={row: 1.0 for row in range(6)})  # k3 = exp(-1) - 1 + 1 = 0.37 nats a token
    with pytest.raises(NumericError, match=r"disagree.*0\.36.*max_mismatch_k3 = 0\.1"):
        stage(score, monkeypatch, "1", "0")
    assert not Path("data/scores/iteration=1").exists()


def test_rollouts_of_another_policy_are_refused(project, monkeypatch):
    path = Path("data/checkpoints/policy/0/README.md")
    path.write_text("edited by hand\n")
    with pytest.raises(StaleInput, match=r"another policy.*dvc repro rollout@1"):
        stage(score, monkeypatch, "1", "0")


def test_advantages_made_with_another_critic_are_refused(project, monkeypatch):
    stage(score, monkeypatch, "1", "0")
    stage(advantages, monkeypatch, "1", "0")
    path = Path("data/checkpoints/critic/0/critic.json")
    path.write_text(path.read_text() + "\n")
    with pytest.raises(StaleInput, match="another critic"):
        stage(ppo_update, monkeypatch, "1", "0")


def test_a_language_model_in_the_reward_model_s_place_is_refused(project, monkeypatch):
    target = Path("data/checkpoints/reward_model")
    for path in Path("data/checkpoints/policy/0").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match=r"score\.weight"):
        stage(score, monkeypatch, "1", "0")


def test_a_crash_between_passes_costs_only_the_pass_that_was_running(project, monkeypatch):
    from rlhf_core.reward.passes import Passes

    def killed(self, name, directory):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Passes, "reward_model", killed)
        with pytest.raises(KeyboardInterrupt):
            stage(score, patched, "1", "0")
    with monkeypatch.context() as patched:
        patched.setattr("rlhf_core.reward.passes.load_causal_lm", lambda *a, **k: pytest.fail("the pass ran again"))
        stage(score, patched, "1", "0")
    assert read_metadata(Path("data/scores/iteration=1"))["stage"] == "score"


def test_without_preferences_the_stage_says_so_and_leaves_no_model(project, monkeypatch):
    change("ingest", preferences=None)
    set_rewards(judge={"kind": "judge"})
    table = read_table(Path("data/preferences")).slice(0, 0)
    write_shard(Path("data/preferences") / shard_name(0), table, PREFERENCES, read_metadata(Path("data/preferences")))
    train_rm.main()
    assert sorted(path.name for path in Path("data/checkpoints/reward_model").iterdir()) == [
        "README.md",
        "lineage.json",
    ]
    stage(score, monkeypatch, "1", "0")
    assert "score_judge" in read_table(Path("data/scores/iteration=1")).column_names
