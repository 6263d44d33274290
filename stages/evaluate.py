"""Sample and score the held-out prompts with one policy: `python -m stages.evaluate ITERATION` (0 = base)."""

import sys
from pathlib import Path
from typing import Any

from rlhf_core.sampling.engine import LOGPROBS_MODE, prepare_environment, vllm_version

if __name__ == "__main__":
    prepare_environment()  # may start this process again, so before the heavy imports

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.shards import iter_tables, read_metadata, write_shard
from rlhf_core.config import TRAINING_ONLY, Params, load_run
from rlhf_core.models.tokenizer import eos_ids, load_tokenizer, pad_id
from rlhf_core.reward.evaluation import PROXY, append_evaluation, evaluation_metrics
from rlhf_core.reward.passes import Passes, numbered
from rlhf_core.reward.sources import (
    check_functions,
    described_inputs,
    described_models,
    described_sources,
    reward_models,
    run_other_sources,
    run_reward_models,
)
from rlhf_core.sampling.evaluation import sample_held_out
from rlhf_core.seeding import derive_seed
from rlhf_core.stage import publish, run_stage, work_directory, write_json

CHECKPOINTS, PROMPTS = Path("data/checkpoints"), Path("data/prompts")
REFERENCE, REWARD_MODEL = CHECKPOINTS / "policy/0", CHECKPOINTS / "reward_model"


def main() -> None:
    """Sample, score and compare with the reference; every iteration sees the same prompts."""
    iteration = sys.argv[1]
    params = load_run().params
    rewards = params.evaluate.rewards
    check_functions(rewards)
    policy = CHECKPOINTS / "policy" / iteration
    tokenizer = load_tokenizer(policy)
    metadata = described(iteration, policy, params, eos_ids(policy, tokenizer))
    work = work_directory(f"evaluate@{iteration}", metadata)
    sample_held_out(PROMPTS, policy, work / "samples", metadata, **sampling_options(params))

    passes = Passes(
        shards=numbered([work / "samples"]),
        prompts=PROMPTS,
        work=work / "passes",
        **params.compute.model_dump(exclude=TRAINING_ONLY),
        temperature=params.evaluate.temperature or 1.0,  # greedy responses are compared at temperature 1
        pad_id=pad_id(tokenizer),
        eos_ids=metadata["eos_ids"],
    )
    run_other_sources(passes, rewards)  # first: what is wrong with them shows before a model has run
    passes.token_logprobs("logprobs", policy)
    if metadata["reference"] != metadata["policy"]:
        passes.token_logprobs("ref_logprobs", REFERENCE)
    run_reward_models(passes, reward_models(rewards, REWARD_MODEL))
    if (REWARD_MODEL / "config.json").is_file():
        passes.reward_model(PROXY, REWARD_MODEL)
    weights = {name: source.weight for name, source in rewards.items()}
    scored = {name: append_evaluation(table, name, passes, weights) for name, table in iter_tables(work / "samples")}
    for name, table in scored.items():
        write_shard(work / "out" / name, table, table.schema, metadata)
    publish(work / "out", Path(f"data/evaluations/iteration={iteration}"))
    write_json(Path(f"data/metrics/evaluate/{iteration}.json"), evaluation_metrics(list(scored.values()), weights))


def described(iteration: str, policy: Path, params: Params, ends: list[int]) -> dict[str, Any]:
    """Return the metadata of the shards: everything that the result depends on."""
    rewards = params.evaluate.rewards
    models = described_models(rewards, REWARD_MODEL, group="evaluate.rewards")
    inputs = {str(path): hash_path(path) for path in (PROMPTS, policy, REFERENCE, REWARD_MODEL)}
    inputs |= {str(path): models[name] for name, path in reward_models(rewards, REWARD_MODEL).items()}
    inputs |= described_inputs(rewards)
    return {
        "stage": "evaluate",
        "iteration": iteration,
        "inputs": inputs,
        "policy": inputs[str(policy)],
        "reference": inputs[str(REFERENCE)],
        "tokenizer": read_metadata(PROMPTS)["tokenizer"],
        "eos_ids": ends,
        "temperature": params.evaluate.temperature,
        "logprobs_mode": LOGPROBS_MODE,
        "vllm": vllm_version(),
        "rewards": described_sources(rewards),
        "reward_models": models,
        **params.model_dump(include={"seed", "sampling", "evaluate", "compute"}, exclude={"evaluate": {"rewards"}}),
    }


def sampling_options(params: Params) -> dict[str, Any]:
    """Return what sampling needs to know, as plain keywords."""
    return {
        **params.sampling.model_dump(exclude={"temperature"}),
        **params.evaluate.model_dump(exclude={"rewards"}),
        "seed": derive_seed(params.seed, "evaluate"),
    }


if __name__ == "__main__":
    run_stage("evaluate@" + sys.argv[1], main)
