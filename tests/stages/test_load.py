"""Many responses and long ones: memory is that of a shard, whatever their number, and length is no limit of ours.

Mutations that must fail here: all scored shards kept until the last is scored; a mean over shards of their means.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rlhf_core.artifacts.schema import ROLLOUTS
from rlhf_core.artifacts.shards import read_metadata, read_table, shard_name, shard_paths, write_shard
from stages import advantages, ppo_update, score
from tests.tiny_run import change, set_rewards, stage

ROLLOUTS_1 = Path("data/rollouts/iteration=1")


def write(responses: list[list[int]], *, rows_per_shard: int, max_new_tokens: int = 40) -> None:
    """Replace the rollouts of iteration 1 by these responses."""
    metadata = {**read_metadata(ROLLOUTS_1), "sampling": {"max_new_tokens": max_new_tokens}}
    row = read_table(ROLLOUTS_1).slice(0, 1).to_pylist()[0]
    for path in shard_paths(ROLLOUTS_1):
        path.unlink()
    rows = [
        {
            **row,
            "sample_id": f"1-p{index}-0",
            "prompt_id": f"p{index}",
            "response": "text " * len(ids),
            "response_ids": ids,
            "sampler_logprobs": [-5.0] * len(ids),
            "finish_reason": "stop" if ids[-1:] == [2] else "length",
        }
        for index, ids in enumerate(responses)
    ]
    for number, start in enumerate(range(0, len(rows), rows_per_shard)):
        table = pa.Table.from_pylist(rows[start : start + rows_per_shard], schema=ROLLOUTS)
        write_shard(ROLLOUTS_1 / shard_name(number), table, ROLLOUTS, metadata)


def test_score_holds_one_shard_in_memory_and_its_metrics_are_those_of_all_rows(project, monkeypatch):
    dice = np.random.default_rng(0)
    responses = [dice.integers(10, 200, dice.integers(0, 60)).tolist() for _ in range(600)]
    write(responses, rows_per_shard=15, max_new_tokens=60)
    set_rewards(rule={"kind": "length", "min_tokens": 20, "max_tokens": 30, "falloff_tokens": 20})
    change("compute", max_batch_tokens=8192)
    change("score", max_mismatch_k3=1e9)
    held, sizes, before = [], [], pa.total_allocated_bytes()

    def watched(path, table, schema, metadata):
        held.append(pa.total_allocated_bytes() - before)
        sizes.append(table.nbytes)
        write_shard(path, table, schema, metadata)

    monkeypatch.setattr("rlhf_core.reward.scores.write_shard", watched)
    stage(score, monkeypatch, "1", "0")
    assert len(sizes) == 40
    assert max(held) < 5 * max(sizes) < sum(sizes) / 4

    rows = read_table(Path("data/scores/iteration=1"))
    found = json.loads(Path("data/metrics/score/1.json").read_text())
    scores = np.array(rows["score"].to_pylist(), np.float64)
    assert found["score/responses"] == 600 and len(set(scores)) > 3
    assert found["objective/scores"] == pytest.approx(scores.mean(), rel=1e-12)
    assert found["objective/scores_std"] == pytest.approx(scores.std(), rel=1e-12)
    logprobs = [np.array(row, np.float64) for row in rows["logprobs"].to_pylist()]
    assert found["objective/entropy"] == pytest.approx(np.mean([-row.sum() for row in logprobs if row.size]), rel=1e-12)
    difference = -5.0 - np.concatenate(logprobs)
    assert found["mismatch/k1"] == pytest.approx(difference.mean(), rel=1e-9)
    assert found["mismatch/max_abs"] == pytest.approx(np.abs(difference).max(), rel=1e-12)
    worst = json.loads(Path("data/mismatch/1.json").read_text())["worst_tokens"]
    assert abs(worst[0]["difference"]) == found["mismatch/max_abs"]
    sizes_of_worst = [abs(token["difference"]) for token in worst]
    assert sizes_of_worst == sorted(np.abs(difference), reverse=True)[: len(worst)] and len(worst) > 5


def test_a_response_of_10_000_tokens_is_scored_and_trained_on(project, monkeypatch):
    dice = np.random.default_rng(0)
    write([[*dice.integers(10, 200, 9_999).tolist(), 2], [80, 2]], rows_per_shard=1, max_new_tokens=10_000)
    set_rewards(rule={"kind": "regex", "pattern": "text", "match": "search"})
    change("sampling", max_new_tokens=10_000, max_model_len=16_384)
    change("compute", max_batch_tokens=10_500)
    change("score", max_mismatch_k3=1e9)
    change("ppo_update", ppo_epochs=1, minibatch_size=2)
    for module in (score, advantages, ppo_update):
        stage(module, monkeypatch, "1", "0")
    rows = read_table(Path("data/advantages/iteration=1")).to_pylist()
    assert [len(row["advantages"]) for row in rows] == [10_000, 2]
    assert np.isfinite(rows[0]["advantages"]).all() and np.std(rows[0]["advantages"]) > 0
    found = json.loads(Path("data/metrics/ppo_update/1.json").read_text())
    assert found["optimizer_steps"] == 1 and np.isfinite(list(found.values())).all()
