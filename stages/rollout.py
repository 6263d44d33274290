"""Responses sampled by vLLM for one iteration: `python -m stages.rollout ITERATION PREVIOUS`."""

import sys
from pathlib import Path
from typing import Any

from rlhf_core.sampling.engine import LOGPROBS_MODE, Sampler, check_model, prepare_environment, vllm_version

if __name__ == "__main__":
    prepare_environment()  # may start this process again, so it comes before the slow imports

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.shards import read_metadata
from rlhf_core.config import Run, load_run
from rlhf_core.disk import require_space
from rlhf_core.errors import StaleInput
from rlhf_core.models.tokenizer import eos_ids, load_tokenizer
from rlhf_core.sampling import rollouts
from rlhf_core.sampling.rollouts import Prompt
from rlhf_core.seeding import derive_seed
from rlhf_core.stage import publish, run_stage, work_directory, write_json

PROMPTS = Path("data/prompts")


def main() -> None:
    """Sample the shards that are not there yet, then publish all; the engine starts only when one is missing."""
    iteration, prev = sys.argv[1:3]
    run = load_run()
    params, policy = run.at(iteration), Path(f"data/checkpoints/policy/{prev}")
    check_model(policy)
    metadata = described(run, iteration, policy)
    chosen = chosen_prompts(run, iteration)
    shards = rollouts.cut(chosen, params.rollout.shard_prompts)
    ids = [[prompt.prompt_id for prompt in shard] for shard in shards]
    work = work_directory(f"rollout@{iteration}", {**metadata, "shards": ids})
    out, metrics = Path(f"data/rollouts/iteration={iteration}"), Path(f"data/metrics/rollout/{iteration}.json")
    asked = len(chosen) * params.rollout.samples_per_prompt
    if rollouts.is_published(work, out):
        write_json(metrics, rollouts.rollout_metrics(out, asked=asked))
        return
    shared: dict[str, Any] = {"iteration": iteration, "n": params.rollout.samples_per_prompt, "metadata": metadata}
    missing = rollouts.unfinished(work, shards, **shared)
    if missing and not chosen:
        rollouts.write_empty_shard(work, metadata)
    elif missing:
        sampling = params.sampling.model_dump()
        prompts = [prompt for number in missing for prompt in shards[number]]
        require_space(
            work, rollouts.most_bytes(prompts, shared["n"], sampling["max_new_tokens"]), "what is to be sampled"
        )
        shared |= {name: sampling.pop(name) for name in ("temperature", "max_new_tokens")}
        sampler = Sampler(policy, **sampling, seed=params.seed)
        tokenizer = load_tokenizer(policy)
        decode = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
        seed = derive_seed(params.seed, "rollout", iteration)
        rollouts.sample_shards(sampler, work, shards, missing, decode, eos_ids=metadata["eos_ids"], seed=seed, **shared)
    write_json(metrics, rollouts.rollout_metrics(work, asked=asked))
    rollouts.remember(work)
    publish(work, out)


def chosen_prompts(run: Run, iteration: str) -> list[Prompt]:
    """Return this iteration's prompts, continuing where the earlier iterations of its chain stopped."""
    params, prompts = run.at(iteration), rollouts.read_prompts(PROMPTS, "train")
    *earlier, count = (run.at(name).rollout.prompts_per_iteration for name in run.chain(iteration))
    chosen = rollouts.choose_prompts(prompts, seed=params.seed, position=sum(earlier), count=count)
    rollouts.check_lengths(chosen, max_model_len=params.sampling.max_model_len)
    return chosen


def described(run: Run, iteration: str, policy: Path) -> dict[str, Any]:
    """Return the metadata of the shards: what the samples depend on."""
    params, tokenizer = run.at(iteration), hash_tokenizer(policy)
    if read_metadata(PROMPTS)["tokenizer"] != tokenizer:
        raise StaleInput(f"{PROMPTS} was made with another tokenizer than that of {policy}; run `dvc repro ingest`")
    inputs = {str(path): hash_path(path) for path in (PROMPTS, policy)}
    return {
        "stage": "rollout",
        "iteration": iteration,
        "inputs": inputs,
        "policy": inputs[str(policy)],
        "tokenizer": tokenizer,
        "eos_ids": eos_ids(policy, load_tokenizer(policy)),
        "temperature": params.sampling.temperature,
        "logprobs_mode": LOGPROBS_MODE,
        "vllm": vllm_version(),
        **params.model_dump(include={"seed", "sampling", "rollout"}),
    }


if __name__ == "__main__":
    run_stage("rollout@" + sys.argv[1], main)
