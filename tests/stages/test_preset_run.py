"""The graph of the preset `sums` on the tiny model, from train_rm to report, without vLLM.

The tiny run's responses have no text of their own; here they get some, and a result to be checked against.
"""

import json
import shutil
from pathlib import Path

import pytest

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.schema import PREFERENCES, PROMPTS
from rlhf_core.artifacts.shards import iter_tables, read_table, shard_name, write_shard
from rlhf_core.presets import apply_preset
from rlhf_core.sampling.rollouts import rollout_metrics
from rlhf_core.stage import write_json
from stages import advantages, evaluate, init_critic, ppo_update, report, score, train_rm
from tests.stages.test_reward_sources import set_column
from tests.tiny_run import POLICY, ROOT, change, stage

ONE = 'iterations:\n  "1": {prev: "0", rollout: {}, score: {}, advantages: {}, ppo_update: {}}\n'
TEXTS = ["It is 7.", "6", "", "3 + 4 = 7", "8", "7"]


def test_without_a_reward_model_every_stage_runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "presets", "presets")
    apply_preset(project, "sums")
    Path("iterations.yaml").write_text(ONE)
    change("compute", max_batch_tokens=40)
    change("rollout", prompts_per_iteration=3, samples_per_prompt=2)
    change("ppo_update", minibatch_size=3)
    set_column("response", TEXTS)
    set_column("ground_truth", ["7"] * 6)
    metadata = {"stage": "ingest", "tokenizer": hash_tokenizer(POLICY / "0")}
    write_shard(Path("data/prompts") / shard_name(0), PROMPTS.empty_table(), PROMPTS, metadata)
    write_shard(Path("data/preferences") / shard_name(0), PREFERENCES.empty_table(), PREFERENCES, metadata)

    def sample(prompts, policy, out, metadata, **options):
        for name, table in iter_tables(Path("data/rollouts/iteration=1")):
            write_shard(out / name, table, table.schema, metadata)

    monkeypatch.setattr(evaluate, "sample_held_out", sample)
    train_rm.main()
    init_critic.main()
    stage(evaluate, monkeypatch, "0")
    for module in (score, advantages, ppo_update):
        stage(module, monkeypatch, "1", "0")
    stage(evaluate, monkeypatch, "1")
    write_json(Path("data/metrics/rollout/1.json"), rollout_metrics(Path("data/rollouts/iteration=1"), asked=6))
    report.main()

    assert not (project / "data/checkpoints/reward_model/config.json").exists()
    rows = read_table(Path("data/advantages/iteration=1"))
    # partial_credit 0.2: 6 and 8 are one seventh away from 7. Two responses to a prompt; the first pair is 1 and 0.171.
    near = pytest.approx(0.2 * (1 - 1 / 7), abs=1e-6)
    assert rows["score_right"].to_pylist() == [1, near, 0, 1, near, 1]
    signs = [[(a > 0) - (a < 0) for a in row[:1]] for row in rows["advantages"].to_pylist()]
    assert signs[:2] == [[1], [-1]] and signs[4:] == [[-1], [1]]
    assert hash_path(POLICY / "1") != hash_path(POLICY / "0")
    assert json.loads(Path("data/metrics/train_rm.json").read_text()) == {"train/pairs": 0}
    assert Path("data/report/index.html").is_file()
