"""Append scores, logprobs, reference logprobs and values to the rollouts: `python -m stages.score ITERATION PREV`."""

import sys
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.shards import iter_tables, read_metadata, write_shard
from rlhf_core.config import Params, load_run
from rlhf_core.errors import ModelError, NumericError, StaleInput
from rlhf_core.models.tokenizer import load_tokenizer, pad_id
from rlhf_core.reward.passes import Passes
from rlhf_core.reward.scores import append_scores, score_metrics
from rlhf_core.stage import publish, run_stage, work_directory, write_json

CHECKPOINTS = Path("data/checkpoints")
REFERENCE, REWARD_MODEL = CHECKPOINTS / "policy/0", CHECKPOINTS / "reward_model"


def main() -> None:
    """Run each model over all rows, one after the other, then write every shard with its new columns."""
    iteration, prev = sys.argv[1:3]
    params = load_run().at(iteration)
    rollouts = Path(f"data/rollouts/iteration={iteration}")
    policy, critic = CHECKPOINTS / "policy" / prev, CHECKPOINTS / "critic" / prev
    metadata = described(rollouts, policy, critic, params)
    work = work_directory(f"score@{iteration}", metadata)
    passes = Passes(
        source=rollouts,
        work=work / "passes",
        **params.compute.model_dump(),
        temperature=metadata["temperature"],
        pad_id=pad_id(load_tokenizer(policy)),
        eos_ids=metadata["eos_ids"],
    )
    rewards = {str(name): weight for name, weight in params.score.rewards.items()}
    passes.token_logprobs("logprobs", policy, critic)
    if metadata["reference"] != metadata["policy"]:
        passes.token_logprobs("ref_logprobs", REFERENCE)
    if "reward_model" in params.score.rewards:
        passes.reward_model(REWARD_MODEL)
    if "judge" in params.score.rewards:
        passes.judge()
    scored = [(name, append_scores(table, name, passes, rewards)) for name, table in iter_tables(rollouts)]
    metrics = score_metrics([table for _, table in scored], rewards)
    if metrics["mismatch/k3"] > params.score.max_mismatch_k3:
        raise NumericError(
            f"iteration {iteration}: sampler and trainer disagree about the sampler's own policy by"
            f" {metrics['mismatch/k3']:.4g} nats a token (mismatch/k3), allowed is score.max_mismatch_k3 ="
            f" {params.score.max_mismatch_k3}. Likely causes: another temperature or dtype on one side,"
            f" or weights that one"
            " side does not load; try sampling.dtype float32 and compute.precision float32"
        )
    for name, table in scored:
        write_shard(work / "out" / name, table, table.schema, metadata)
    publish(work / "out", Path(f"data/scores/iteration={iteration}"))
    write_json(Path(f"data/metrics/score/{iteration}.json"), metrics)


def described(rollouts: Path, policy: Path, critic: Path, params: Params) -> dict[str, Any]:
    """Return the metadata of the new shards, after checking that the rollouts are this policy's."""
    metadata = read_metadata(rollouts)
    if metadata["policy"] != hash_path(policy):
        raise StaleInput(
            f"{rollouts} was sampled from another policy than {policy}; run `dvc repro rollout@{metadata['iteration']}`"
        )
    metadata |= {"reference": hash_path(REFERENCE), "critic": hash_path(critic), "precision": params.compute.precision}
    if "reward_model" in params.score.rewards:
        metadata["reward_model"] = hash_path(REWARD_MODEL)
        if hash_tokenizer(REWARD_MODEL) != metadata["tokenizer"]:
            raise ModelError(
                f"{REWARD_MODEL}: its tokenizer is not the policy's; a reward model reads the policy's ids"
            )
    inputs = {**metadata["inputs"], "rollouts": hash_path(rollouts)}
    return metadata | {"stage": "score", "inputs": inputs, "rewards": dict(params.score.rewards)}


if __name__ == "__main__":
    run_stage("score@" + sys.argv[1], main)
