"""Two iterations through score, advantages and ppo_update for each kind of critic, the second replaying the first."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.shards import read_table
from rlhf_core.models.checkpoint import critic_kind
from stages import advantages, init_critic, ppo_update, score
from tests.stages.test_critic import head_of, values_by_hand, write_gpt2
from tests.tiny_run import POLICY, RESPONSES, change, stage, write_rollouts

CRITICS = Path("data/checkpoints/critic")
KINDS = {
    "shared": ("shared", "policy", "gae"),
    "separate": ("separate", "policy", "reward_minus_value"),
    "separate from the reward model": ("separate", "reward_model", "gae"),
    "separate of another architecture": ("separate", "gpt2", "gae"),
    "none": ("none", "policy", "rloo"),
}


def iterate(monkeypatch: pytest.MonkeyPatch, iteration: str, prev: str) -> dict[str, float]:
    for module in (score, advantages, ppo_update):
        stage(module, monkeypatch, iteration, prev)
    names = ("score", "advantages", "ppo_update")
    found = [json.loads(Path(f"data/metrics/{name}/{iteration}.json").read_text()) for name in names]
    return found[0] | found[1] | found[2]


@pytest.mark.parametrize("kind, init, estimator", KINDS.values(), ids=KINDS)
def test_two_iterations(project, monkeypatch, kind, init, estimator):
    if init == "gpt2":
        init = str(write_gpt2(project / "gpt2"))
    change("critic", kind=kind, init=init)
    change("score", full_kl=True, replay=[1])
    change("advantages", estimator=estimator, kl_estimator="full", correction="truncate")
    init_critic.main()
    iterate(monkeypatch, "1", "0")
    write_rollouts("2", "1")
    found = iterate(monkeypatch, "2", "1")
    assert all(np.isfinite(value) for value in found.values())
    assert found["replay/responses"] == 6 and found["objective/full_kl"] > 0
    assert critic_kind(CRITICS / "2") == kind
    rows = read_table(Path("data/advantages/iteration=2"))
    assert rows.num_rows == 12 and ("values" in rows.column_names) == ("returns" in rows.column_names) == (
        kind != "none"
    )
    policies = {hash_path(POLICY / name / "model.safetensors") for name in ("0", "1", "2")}
    assert len(policies) == 3
    if kind != "none":
        assert len({hash_path(CRITICS / name) for name in ("0", "1", "2")}) == 3


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_second_iteration_scores_with_the_critic_that_the_first_trained(project, monkeypatch, kind):
    change("critic", kind=kind)
    init_critic.main()
    iterate(monkeypatch, "1", "0")
    write_rollouts("2", "1")
    stage(score, monkeypatch, "2", "1")
    trunk = POLICY / "1" if kind == "shared" else CRITICS / "1/backbone"
    model, head = AutoModel.from_pretrained(trunk, dtype=torch.float32).eval(), head_of(CRITICS / "1")
    for row, response in zip(read_table(Path("data/scores/iteration=2")).to_pylist(), RESPONSES, strict=True):
        expected = values_by_hand(model, head, response)
        assert row["values"] == pytest.approx(expected[:-1], abs=1e-4)
        assert row["bootstrap_value"] == pytest.approx(expected[-1], abs=1e-4)
        assert max(map(abs, expected)) > 1e-4  # it has learned something


def test_an_iteration_that_only_replays_trains(project, monkeypatch):
    change("score", replay=[1])
    change("advantages", correction="reject_sequence")
    iterate(monkeypatch, "1", "0")
    write_rollouts("2", "1", empty=True)
    found = iterate(monkeypatch, "2", "1")
    assert all(np.isfinite(value) for value in found.values())
    assert (found["score/responses"], found["replay/responses"]) == (0, 6)
    assert found["optimizer_steps"] == 4  # 5 responses with tokens in minibatches of 3 and 2, two epochs
    assert hash_path(POLICY / "2/model.safetensors") != hash_path(POLICY / "1/model.safetensors")
