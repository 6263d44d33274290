"""score beyond one critic: the full KL, replayed iterations, the worst tokens, and the gate's text.

Mutations that must fail here: replayed rows in the gate or in the means; replayed rows scored by their own policy;
steps back counted from the wrong end; full KL with policy and reference swapped; worst tokens sorted by signed
difference.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.shards import read_metadata, read_table, shard_paths
from rlhf_core.config import load_run
from rlhf_core.errors import DataError, ModelError, NumericError, StaleInput
from rlhf_core.reward.passes import Passes
from stages import init_critic, score
from tests.tiny import tiny_model
from tests.tiny_run import POLICY, PROMPT, RESPONSES, change, policy_logprobs, stage, write_policy, write_rollouts

REPLAY = Path("data/scores/iteration=2")


@pytest.fixture
def two(project: Path) -> Path:
    """Iteration 2 is about to be scored, and replays iteration 1: policy 1 is policy 0 with noise."""
    change("score", replay=[1])
    change("advantages", correction="truncate")
    write_policy("1", noise=0.02)
    shutil.copytree("data/checkpoints/critic/0", "data/checkpoints/critic/1")
    write_rollouts("2", "1")
    return project


def metrics_of(iteration: str) -> dict[str, float]:
    return json.loads(Path(f"data/metrics/score/{iteration}.json").read_text())


# --- replay -------------------------------------------------------------------------------------------------------


def test_replayed_rows_follow_the_own_ones_and_are_scored_by_the_current_policy(two, monkeypatch):
    stage(score, monkeypatch, "2", "1")
    assert len(shard_paths(REPLAY)) == 4
    rows = read_table(REPLAY).to_pylist()
    assert [row["sample_id"] for row in rows] == [f"{k}-p{i}-{j}" for k in (2, 1) for i in range(3) for j in range(2)]
    for row, response in zip(rows, RESPONSES * 2, strict=True):
        current, before = (policy_logprobs(POLICY / name, response) for name in ("1", "0"))
        assert row["logprobs"] == pytest.approx(current, abs=1e-4)
        assert row["ref_logprobs"] == pytest.approx(before, abs=1e-4)
        sampler = current if row["sample_id"].startswith("2-") else before
        assert row["sampler_logprobs"] == pytest.approx(sampler, abs=1e-4)
    again = {row["sample_id"].split("-", 1)[1]: row["score"] for row in rows[6:]}
    assert again == {row["sample_id"].split("-", 1)[1]: row["score"] for row in rows[:6]}  # same texts, same scores


def test_the_gate_and_the_means_are_those_of_the_own_rows(two, monkeypatch):
    stage(score, monkeypatch, "2", "1")
    found = metrics_of("2")
    assert found["mismatch/max_abs"] < 1e-4 and found["score/responses"] == 6
    # Replayed rows: d = log of sampler (policy 0) over current (policy 1), weights exp(-d), over all 16 tokens.
    d = np.concatenate(
        [np.subtract(*(policy_logprobs(POLICY / name, response) for name in ("0", "1"))) for response in RESPONSES]
    )
    weights = np.exp(-d)
    assert len(d) == 16 and found["replay/responses"] == 6
    assert found["replay/k3"] == pytest.approx(np.mean(weights - 1 + d), rel=1e-3)
    assert found["replay/ess"] == pytest.approx(weights.sum() ** 2 / (16 * (weights**2).sum()), rel=1e-4)
    own = [row for row in read_table(REPLAY).to_pylist() if row["sample_id"].startswith("2-")]
    kl = np.mean([sum(row["logprobs"]) - sum(row["ref_logprobs"]) for row in own if row["logprobs"]])
    assert found["objective/kl"] == pytest.approx(kl, abs=1e-6)
    assert json.loads(Path("data/mismatch/2.json").read_text())["max_abs"] == found["mismatch/max_abs"]


def test_the_metadata_name_what_was_replayed(two, monkeypatch):
    stage(score, monkeypatch, "2", "1")
    metadata = read_metadata(REPLAY)
    assert metadata["iteration"] == "2" and metadata["policy"] == hash_path(POLICY / "1")
    assert metadata["inputs"]["data/rollouts/iteration=1"] == hash_path(Path("data/rollouts/iteration=1"))


def test_steps_beyond_the_start_of_the_chain_are_left_out(two, monkeypatch):
    change("score", replay=[2, 1])
    run = load_run()
    assert score.replayed_iterations(run, "2") == ["1"] and score.replayed_iterations(run, "1") == []
    stage(score, monkeypatch, "1", "0")
    assert read_table(Path("data/scores/iteration=1")).num_rows == 6
    assert "replay/responses" not in metrics_of("1")


def test_steps_are_counted_along_the_chain_not_along_the_file(two):
    text = Path("iterations.yaml").read_text()
    entry = '  "{}": {{prev: "{}", rollout: {{}}, score: {{replay: [2, 1]}}, advantages: {{}}, ppo_update: {{}}}}\n'
    Path("iterations.yaml").write_text(text + entry.format("b", "1") + entry.format("c", "b"))
    assert score.replayed_iterations(load_run(), "c") == ["1", "b"]  # a branch beside 2


@pytest.mark.parametrize(
    "fact, value, text",
    [
        ("tokenizer", "another", "tokenizer is 'another'"),
        ("eos_ids", [2], r"eos_ids is \[2\], expected \[2, 4\]"),
        ("temperature", 1.0, "temperature is 1.0, expected 0.7"),
        ("iteration", "7", "iteration is '7', expected '1'"),
    ],
)
def test_rollouts_that_do_not_fit_are_not_replayed(two, monkeypatch, fact, value, text):
    write_rollouts("1", "0", facts={fact: value})
    with pytest.raises(StaleInput, match=rf"iteration=1, replayed by iteration 2: {text}.*dvc repro rollout@1"):
        stage(score, monkeypatch, "2", "1")
    assert not REPLAY.exists()


def test_a_replay_that_was_interrupted_goes_on(two, monkeypatch):
    def killed(self, name, directory):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Passes, "reward_model", killed)
        with pytest.raises(KeyboardInterrupt):
            stage(score, patched, "2", "1")
    with monkeypatch.context() as patched:
        patched.setattr("rlhf_core.reward.passes.load_causal_lm", lambda *a, **k: pytest.fail("the pass ran again"))
        stage(score, patched, "2", "1")
    assert read_table(REPLAY).num_rows == 12


def test_an_iteration_that_sampled_nothing_is_scored_by_its_replay(two, monkeypatch):
    for path in Path("data/rollouts/iteration=2").iterdir():
        path.unlink()
    write_rollouts("2", "1", empty=True)
    stage(score, monkeypatch, "2", "1")
    assert [row["sample_id"][:2] for row in read_table(REPLAY).to_pylist()] == ["1-"] * 6
    found = metrics_of("2")
    assert (found["score/responses"], found["replay/responses"], found["mismatch/k3"]) == (0, 6, 0.0)
    assert "objective/kl" not in found and all(np.isfinite(value) for value in found.values())
    assert json.loads(Path("data/mismatch/2.json").read_text())["worst_tokens"] == []


def test_nothing_to_score_is_an_error(project, monkeypatch):
    for path in Path("data/rollouts/iteration=1").iterdir():
        path.unlink()
    write_rollouts(empty=True)
    with pytest.raises(DataError, match=r"iteration 1: data/rollouts/iteration=1 hold no response"):
        stage(score, monkeypatch, "1", "0")


# --- full KL ------------------------------------------------------------------------------------------------------


def test_full_kl_is_that_of_the_whole_distributions(two, monkeypatch):
    change("score", full_kl=True)
    change("compute", logits_chunk_tokens=3)
    stage(score, monkeypatch, "2", "1")
    models = [AutoModelForCausalLM.from_pretrained(POLICY / name, dtype=torch.float32).eval() for name in ("1", "0")]
    rows = read_table(REPLAY).to_pylist()
    for row, response in zip(rows, RESPONSES * 2, strict=True):
        with torch.no_grad():
            ids = torch.tensor([PROMPT + response])
            log_p, log_q = (
                torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1].double() / 0.7, -1) for model in models
            )
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert row["full_kl"] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)
        assert all(value > 0 for value in row["full_kl"])
    own = [sum(row["full_kl"]) for row in rows[:6] if row["full_kl"]]
    assert metrics_of("2")["objective/full_kl"] == pytest.approx(np.mean(own), rel=1e-6)


def test_full_kl_of_the_reference_itself_is_zero_and_needs_no_pass(project, monkeypatch):
    change("score", full_kl=True)
    monkeypatch.setattr(Passes, "full_kl", lambda *a: pytest.fail("the policy is the reference"))
    stage(score, monkeypatch, "1", "0")
    for row in read_table(Path("data/scores/iteration=1")).to_pylist():
        assert row["full_kl"] == [0.0] * len(row["response_ids"])


# --- mismatch -----------------------------------------------------------------------------------------------------


def test_the_worst_tokens_are_listed_by_size(project, monkeypatch):
    # Rows 1 (4 tokens), 3 (2 tokens) and 0 (3 tokens) claim 0.2, -0.3 and 0.1 nats more than the trainer finds.
    write_rollouts(shift={0: 0.1, 1: 0.2, 3: -0.3})
    change("score", worst_tokens=7)
    stage(score, monkeypatch, "1", "0")
    found = json.loads(Path("data/mismatch/1.json").read_text())
    worst = found["worst_tokens"]
    names = [token["sample_id"] for token in worst]
    assert names == ["1-p1-1"] * 2 + ["1-p0-1"] * 4 + ["1-p0-0"]
    expected = [-0.3] * 2 + [0.2] * 4 + [0.1]
    assert [token["difference"] for token in worst] == pytest.approx(expected, abs=1e-4)
    for token in worst:
        response = RESPONSES[{"1-p1-1": 3, "1-p0-1": 1, "1-p0-0": 0}[token["sample_id"]]]
        assert token["token_id"] == response[token["position"]]
        assert token["sampler_logprob"] - token["logprob"] == pytest.approx(token["difference"], abs=1e-6)
    texts = {token["token_id"]: token["token"] for token in worst}
    assert texts[4] == "<|im_end|>" and texts[86] == "r"  # id 5 is "!", and 86 - 5 characters later comes "r"
    assert found["iteration"] == "1" and found["max_abs"] == metrics_of("1")["mismatch/max_abs"]
    assert set(found) == {"iteration", "worst_tokens", "k1", "k3", "mean_abs", "max_abs", "clip_fraction", "ess"}


def test_no_tokens_are_listed_where_none_are_asked_for(project, monkeypatch):
    change("score", worst_tokens=0)
    stage(score, monkeypatch, "1", "0")
    assert json.loads(Path("data/mismatch/1.json").read_text())["worst_tokens"] == []


def test_the_gate_names_the_worst_responses_and_leaves_nothing_published(project, monkeypatch):
    write_rollouts(shift={0: 1.0, 1: 2.0, 3: -1.5})
    with pytest.raises(NumericError) as caught:
        stage(score, monkeypatch, "1", "0")
    text = str(caught.value)
    assert "nats a token (mismatch/k3), allowed is score.max_mismatch_k3 = 0.1" in text
    assert text.count("1-p0-1 position") == 3 and "(+2 nats)" in text  # the three worst tokens are all row 1's
    assert not any(Path(f"data/{name}").exists() for name in ("scores", "mismatch", "metrics/score"))
    kept = Path(text.split("more in ")[1].split(". Likely")[0])
    assert json.loads(kept.read_text())["worst_tokens"][0]["sample_id"] == "1-p0-1"


def test_ids_beyond_a_reward_models_or_a_critics_embedding_are_refused_by_name(project, monkeypatch):
    """The policy's vocabulary is padded from 266 to 300 and samples 280; reward model and critic have 266 rows."""
    for path in [*(POLICY / "0").glob("*.safetensors"), POLICY / "0/lineage.json"]:
        path.unlink()
    tiny_model(0, vocab_size=300).save_pretrained(POLICY / "0")
    monkeypatch.setattr("tests.tiny_run.RESPONSES", [[280, 2], [82], [], [86, 4], [87], [92]])
    for path in Path("data/rollouts/iteration=1").iterdir():
        path.unlink()
    write_rollouts()
    words = r"{}: has 266 embedding rows, but data/rollouts/iteration=1/part-00000.parquet holds the token id 280"
    with pytest.raises(ModelError, match=words.format("data/checkpoints/reward_model")):
        stage(score, monkeypatch, "1", "0")
    change("critic", kind="separate", init="data/checkpoints/reward_model")
    shutil.rmtree("data/checkpoints/critic/0")
    init_critic.main()
    with pytest.raises(ModelError, match=words.format("data/checkpoints/critic/0")):
        stage(score, monkeypatch, "1", "0")
