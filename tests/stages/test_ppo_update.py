"""ppo_update by itself: on advantages that are written by hand over real scores of the tiny model.

Mutations that must fail here: the policy's weights changed in warm-up; its optimiser state lost; the sampler's logprobs
ignored; replayed responses counted as episodes; a value head written where there is no critic.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from ruamel.yaml import YAML
from torch._dynamo.utils import counters

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import advantages_schema
from rlhf_core.artifacts.shards import iter_tables, read_metadata, read_table, write_shard
from rlhf_core.models.checkpoint import load_optimizer
from stages import advantages, init_critic, ppo_update, score
from tests.tiny_run import change, stage, write_rollouts
from tests.unit.test_fusing import needs_compiler

CHECKPOINTS = Path("data/checkpoints")


def write_advantages(iteration: str, *, conventions: str = "ours", **changes: list[object]) -> None:
    """Append made-up advantages to data/scores, as the advantages stage would.

    Args:
        iteration: Whose.
        conventions: That they claim to follow.
        changes: Columns with other values, one for each row of all shards.
    """
    source = Path(f"data/scores/iteration={iteration}")
    metadata = {**read_metadata(source), "stage": "advantages", "conventions": conventions}
    rng, row = np.random.default_rng(0), 0
    for name, table in iter_tables(source):
        rows = table.to_pylist()
        for found in rows:
            lengths = len(found["response_ids"])
            found |= {"importance_weights": [1.0] * lengths, "rewards": [0.0] * lengths}
            found["advantages"] = rng.normal(size=lengths).astype(np.float32).tolist()
            if "values" in found:
                found["returns"] = [v + a for v, a in zip(found["values"], found["advantages"], strict=True)]
                found["bootstrap_return"] = None
            found |= {column: values[row] for column, values in changes.items()}
            row += 1
        schema = advantages_schema(table.schema)
        out = Path(f"data/advantages/iteration={iteration}") / name
        write_shard(out, pa.Table.from_pylist(rows, schema=schema), schema, metadata)


def scored(monkeypatch: pytest.MonkeyPatch, iteration: str = "1", prev: str = "0") -> None:
    if iteration != "1":
        write_rollouts(iteration, prev)
    stage(score, monkeypatch, iteration, prev)
    write_advantages(iteration)


def metrics(iteration: str = "1") -> dict[str, float]:
    found: dict[str, float] = json.loads(Path(f"data/metrics/ppo_update/{iteration}.json").read_text())
    return found


def steps(iteration: str = "1") -> list[dict[str, str]]:
    with Path(f"data/plots/ppo_update/{iteration}.csv").open() as handle:
        return list(csv.DictReader(handle))


def weights_hash(name: str) -> bytes:
    return (CHECKPOINTS / "policy" / name / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_policy_critic_and_state_go_on_from_iteration_to_iteration(project, monkeypatch, kind):
    change("critic", kind=kind)
    init_critic.main()
    for iteration, prev in (("1", "0"), ("2", "1")):
        scored(monkeypatch, iteration, prev)
        stage(ppo_update, monkeypatch, iteration, prev)
    state = load_optimizer(CHECKPOINTS / "optimizer/2")
    parts = {"policy", "value_head"} | ({"critic"} if kind == "separate" else set())
    assert state.steps == {part: 8 for part in parts}  # 2 iterations of 2 epochs of minibatches of 3 and 2
    assert state.episode == metrics("2")["episode"] == 12
    assert hash_path(CHECKPOINTS / "critic/2") != hash_path(CHECKPOINTS / "critic/1")
    assert ("critic_grad_norm_avg" in metrics()) == (kind == "separate")
    assert metrics()["update/stopped_early"] == 0 and len(steps()) == 4
    assert float(steps()[0]["policy/ratio_error_max"]) < 1e-4


def two_updates(monkeypatch) -> list[list[str]]:
    """Score, update twice, and return what each update left behind, as hashes."""
    scored(monkeypatch)
    hashes = []
    for _ in range(2):
        stage(ppo_update, monkeypatch, "1", "0")
        hashes.append([hash_path(Path(f"data/{name}")) for name in ("checkpoints", "metrics", "plots")])
    return hashes


def test_the_stage_writes_the_same_bytes_twice(project, monkeypatch):
    change("critic", kind="separate")
    init_critic.main()
    change("ppo_update", ratio="sequence", aggregation="constant", kl_loss_coef=0.1, dual_clip=3.0)
    first, second = two_updates(monkeypatch)
    assert first == second


@pytest.mark.parametrize("precision", ["float32", "bf16-autocast"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_gradient_checkpointing_changes_no_byte(project, monkeypatch, precision, lora_rank):
    change("critic", kind="separate")
    change("ppo_update", lora_rank=lora_rank)
    change("compute", precision=precision)
    init_critic.main()
    scored(monkeypatch)
    found = set()
    for how in ("none", "selective", "recompute"):
        change("compute", gradient_checkpointing=how)
        stage(ppo_update, monkeypatch, "1", "0")
        found.add((weights_hash("1"), hash_path(CHECKPOINTS / "critic/1"), hash_path(Path("data/metrics"))))
    assert len(found) == 1
    assert weights_hash("1") != weights_hash("0")


@needs_compiler
def test_fused_kernels_write_the_same_bytes_twice(project, monkeypatch):
    change("critic", kind="separate")
    change("compute", torch_compile=True)
    init_critic.main()
    torch._dynamo.reset()
    counters.clear()
    first, second = two_updates(monkeypatch)
    assert first == second
    assert counters["stats"]["unique_graphs"] >= 2  # a norm, a gated product: they did run
    assert metrics()["policy/max_first_ratio_error"] < 1e-4


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_warm_up_trains_the_critic_and_leaves_the_policy_bit_by_bit(project, monkeypatch, kind):
    change("critic", kind=kind)
    change("ppo_update", critic_warmup_iterations=1)
    init_critic.main()
    scored(monkeypatch)
    stage(ppo_update, monkeypatch, "1", "0")
    assert weights_hash("1") == weights_hash("0")
    assert hash_path(CHECKPOINTS / "critic/1") != hash_path(CHECKPOINTS / "critic/0")
    assert "Critic warm-up" in (CHECKPOINTS / "policy/1/README.md").read_text()
    assert load_optimizer(CHECKPOINTS / "optimizer/1").steps.keys() == {
        "value_head",
        *(["critic"] * (kind == "separate")),
    }
    # The next iteration is past the warm-up: it restores the critic's state and begins the policy's.
    scored(monkeypatch, "2", "1")
    stage(ppo_update, monkeypatch, "2", "1")
    assert weights_hash("2") != weights_hash("1")
    after = load_optimizer(CHECKPOINTS / "optimizer/2").steps
    assert (after["policy"], after["value_head"]) == (4, 8)


def test_without_a_critic_the_policy_trains_alone(project, monkeypatch):
    change("critic", kind="none")
    change("advantages", estimator="rloo")
    init_critic.main()
    scored(monkeypatch)
    stage(ppo_update, monkeypatch, "1", "0")
    assert weights_hash("1") != weights_hash("0")
    assert sorted(path.name for path in (CHECKPOINTS / "critic/1").iterdir()) == ["critic.json", "lineage.json"]
    assert json.loads((CHECKPOINTS / "critic/1/critic.json").read_text()) == {"kind": "none"}
    assert load_optimizer(CHECKPOINTS / "optimizer/1").steps == {"policy": 4}
    assert not [name for name in metrics() if "value" in name or name.startswith("val/explained")]


def test_the_ratio_may_start_from_the_sampler_s_logprobs(project, monkeypatch):
    # The sampler claims 0.1 nats less on every token, so ratios start at e^0.1 instead of 1.
    write_rollouts(shift={row: -0.1 for row in range(6)})
    stage(score, monkeypatch, "1", "0")
    write_advantages("1")
    for old_logprobs, expected in [("trainer", 1.0), ("sampler", np.exp(0.1))]:
        change("ppo_update", old_logprobs=old_logprobs)
        stage(ppo_update, monkeypatch, "1", "0")
        assert float(steps()[0]["val/ratio"]) == pytest.approx(expected, abs=1e-4)


def test_replayed_responses_are_trained_on_but_are_no_new_episodes(project, monkeypatch):
    stage(score, monkeypatch, "1", "0")
    names = ["1-p0-0", "1-p0-1", "1-p1-0", "0-p1-0", "0-p1-1", "0-p2-0"]
    write_advantages("1", sample_id=names)
    change("ppo_update", minibatch_size=6, ppo_epochs=1)
    stage(ppo_update, monkeypatch, "1", "0")
    assert metrics()["episode"] == 3  # its own, of which one is empty


def test_a_return_after_the_last_token_is_learnt(project, monkeypatch):
    # Values and returns are all 0 but for one slot: 5 responses of 16 tokens, 17 states, 0.5 * 1 / 17 in one minibatch.
    scored(monkeypatch)
    slots = [1.0, None, None, None, None, None]
    write_advantages("1", returns=[[0.0] * length for length in (3, 4, 0, 2, 6, 1)], bootstrap_return=slots)
    change("ppo_update", minibatch_size=6, ppo_epochs=1, value_clip_range=None)
    stage(ppo_update, monkeypatch, "1", "0")
    assert metrics()["loss/value_avg"] == pytest.approx(0.5 / 17, rel=1e-5)


def test_the_slots_of_trl_s_conventions_reach_the_value_loss(project, monkeypatch):
    # All responses are shorter than max_new_tokens, so each has a slot. Values are 0: the loss is half the mean square
    # of all returns, those of the slots included.
    yaml = YAML()
    params = yaml.load(Path("params.yaml").read_text())
    yaml.dump(params | {"conventions": "trl"}, Path("params.yaml"))
    change("ppo_update", minibatch_size=6, ppo_epochs=1, value_clip_range=None)
    stage(score, monkeypatch, "1", "0")
    stage(advantages, monkeypatch, "1", "0")
    stage(ppo_update, monkeypatch, "1", "0")
    table = read_table(Path("data/advantages/iteration=1"), ["returns", "bootstrap_return"]).to_pylist()
    rows = [row for row in table if row["returns"]]
    targets = [target for row in rows for target in (*row["returns"], row["bootstrap_return"])]
    assert len(targets) == 16 + 5
    assert metrics()["loss/value_avg"] == pytest.approx(np.square(targets).mean() / 2, rel=1e-5)


def test_conventions_bound_the_kl_loss(project, monkeypatch):
    # ref_logprobs 13 nats below logprobs: k2 is 84.5, k3 is 12 + e^-13; both projects bound what they bound at 10.
    scored(monkeypatch)
    before = read_table(Path("data/scores/iteration=1"), ["logprobs"])["logprobs"].to_pylist()
    reference = [[value - 13 for value in row] for row in before]
    change("ppo_update", minibatch_size=6, ppo_epochs=1)
    for conventions, estimator, expected in [
        ("ours", "k3", 12.0), ("trl", "k3", 12.0), ("verl", "k3", 10.0), ("verl", "k2", 84.5), ("openrlhf", "k2", 10.0),
    ]:  # fmt: skip
        write_advantages("1", conventions=conventions, ref_logprobs=reference)
        change("ppo_update", kl_loss_estimator=estimator)
        stage(ppo_update, monkeypatch, "1", "0")
        assert metrics()["loss/kl_avg"] == pytest.approx(expected, abs=1e-3)


def test_an_update_that_reaches_target_kl_says_so(project, monkeypatch):
    scored(monkeypatch)
    change("ppo_update", target_kl=1e-6)
    stage(ppo_update, monkeypatch, "1", "0")
    found = metrics()
    assert found["update/stopped_early"] == 1 and found["optimizer_steps"] == len(steps()) < 4
    assert load_optimizer(CHECKPOINTS / "optimizer/1").steps["policy"] == found["optimizer_steps"]


def test_the_constant_of_the_aggregation_is_the_longest_response_that_was_asked_for(project, monkeypatch):
    # max_new_tokens of the rollouts is 40. At ratio 1 the loss is -sum(A) / (5 * 40), and with 8 five times that.
    scored(monkeypatch)
    change("ppo_update", aggregation="constant", minibatch_size=6, ppo_epochs=1)
    found = []
    for constant in (None, 8.0):
        change("ppo_update", aggregation_constant=constant)
        stage(ppo_update, monkeypatch, "1", "0")
        found.append(metrics()["loss/policy_avg"])
    rows = read_table(Path("data/advantages/iteration=1"), ["advantages"])["advantages"].to_pylist()
    total = sum(advantage for row in rows for advantage in row)
    assert found == pytest.approx([-total / 200, -total / 40], rel=1e-4)
