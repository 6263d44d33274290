"""evaluate without vLLM: samples made here are scored by the policy, the reference, the judge and the reward model."""

import json
from pathlib import Path

import pytest

from rlhf_core.artifacts.provenance import hash_tokenizer
from rlhf_core.artifacts.schema import EVALUATIONS, PROMPTS
from rlhf_core.artifacts.shards import iter_tables, read_metadata, read_table, shard_name, write_shard
from stages import evaluate
from tests.tiny_run import POLICY, RESPONSES, policy_logprobs, stage, write_policy


@pytest.mark.parametrize("iteration", ["0", "1"])
def test_samples_are_compared_with_the_reference_and_scored(project, monkeypatch, iteration):
    metadata = {"stage": "ingest", "tokenizer": hash_tokenizer(POLICY / "0")}
    write_shard(Path("data/prompts") / shard_name(0), PROMPTS.empty_table(), PROMPTS, metadata)
    write_policy("1", noise=0.02)

    def sample(prompts, policy, out, metadata, **options):
        for name, table in iter_tables(Path("data/rollouts/iteration=1")):
            write_shard(out / name, table, table.schema, metadata)

    monkeypatch.setattr(evaluate, "sample_held_out", sample)
    stage(evaluate, monkeypatch, iteration)
    out = Path(f"data/evaluations/iteration={iteration}")
    table = read_table(out)
    assert table.schema.equals(EVALUATIONS) and read_metadata(out)["iteration"] == iteration
    for row, response in zip(table.to_pylist(), RESPONSES, strict=True):
        assert row["logprobs"] == pytest.approx(policy_logprobs(POLICY / iteration, response), abs=1e-4)
        assert row["ref_logprobs"] == pytest.approx(policy_logprobs(POLICY / "0", response), abs=1e-4)
        assert row["score_judge"] == -1.0  # "text" is neutral and no finished sentence
    found = json.loads(Path(f"data/metrics/evaluate/{iteration}.json").read_text())
    assert found["eval/responses"] == 6 and (found["eval/kl"] == 0.0) == (iteration == "0")
