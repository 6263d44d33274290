"""Append scores, logprobs, reference logprobs and values to the rollouts: `python -m stages.score ITERATION PREV`."""

import sys
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.shards import read_metadata, read_shard, shard_paths
from rlhf_core.config import TRAINING_ONLY, Params, Run, load_run
from rlhf_core.disk import directory_bytes, require_space
from rlhf_core.errors import DataError, StaleInput
from rlhf_core.models.checkpoint import critic_kind
from rlhf_core.models.memory import keep_freed_memory
from rlhf_core.models.tokenizer import load_tokenizer, pad_id, token_text
from rlhf_core.reward.measures import check_mismatch, check_rows_are_left, mismatch_report, score_metrics
from rlhf_core.reward.passes import Passes, numbered
from rlhf_core.reward.scores import write_scores
from rlhf_core.reward.sources import (
    described_inputs,
    described_models,
    described_sources,
    reward_models,
    run_other_sources,
    run_reward_models,
)
from rlhf_core.stage import publish, run_stage, work_directory, write_json

CHECKPOINTS, PROMPTS = Path("data/checkpoints"), Path("data/prompts")
REFERENCE, REWARD_MODEL = CHECKPOINTS / "policy/0", CHECKPOINTS / "reward_model"


def main() -> None:
    """Run each reward source and model over all rows, one after the other, then write the shards with new columns."""
    iteration, prev = sys.argv[1:3]
    run = load_run()
    params = run.at(iteration)
    sources = [rollouts(name) for name in [iteration, *replayed_iterations(run, iteration)]]
    policy, critic = CHECKPOINTS / "policy" / prev, CHECKPOINTS / "critic" / prev
    metadata = described(sources, policy, critic, params)
    work = work_directory(f"score@{iteration}", metadata)
    tokenizer = load_tokenizer(policy)
    passes = Passes(
        shards=numbered(sources),
        prompts=PROMPTS,
        work=work / "passes",
        **params.compute.model_dump(exclude=TRAINING_ONLY),
        temperature=metadata["temperature"],
        pad_id=pad_id(tokenizer),
        eos_ids=metadata["eos_ids"],
        nonfinite_scores=params.score.nonfinite_scores,
    )
    # A rollouts token is about 6 bytes; its logprobs, reference logprobs and values, kept twice for a while, about 30.
    require_space(work, 6 * sum(map(directory_bytes, sources)), "what the models compute")
    run_other_sources(passes, params.rewards)  # first: what is wrong with them shows before a model has run
    run_passes(passes, policy, critic, params, same_model=metadata["reference"] == metadata["policy"])

    rewards = {name: source.weight for name, source in params.rewards.items()}
    full_kl, count = params.score.full_kl, params.score.worst_tokens
    parts = write_scores(passes, work / "out", metadata, rewards, full_kl=full_kl, worst=count)
    check_rows_are_left(iteration, parts)
    own = parts[: len(shard_paths(sources[0]))]
    report = mismatch_report(own, lambda token_id: token_text(tokenizer, token_id), count=count)
    write_json(work / "mismatch.json", {"iteration": iteration, **report})
    check_mismatch(report, params.score.max_mismatch_k3, work / "mismatch.json")
    publish(work / "out", Path(f"data/scores/iteration={iteration}"))
    publish(work / "mismatch.json", Path(f"data/mismatch/{iteration}.json"))
    write_json(Path(f"data/metrics/score/{iteration}.json"), score_metrics(own, parts[len(own) :], rewards))


def rollouts(iteration: str) -> Path:
    """Return where an iteration's responses are."""
    return Path(f"data/rollouts/iteration={iteration}")


def replayed_iterations(run: Run, iteration: str) -> list[str]:
    """Return the iterations that score.replay names by steps back in the chain; steps beyond its start are left out."""
    chain = run.chain(iteration)
    return [chain[-1 - steps] for steps in run.at(iteration).score.replay if steps < len(chain)]


def run_passes(passes: Passes, policy: Path, critic: Path, params: Params, *, same_model: bool) -> None:
    """Run every model over all rows. A separate critic has a pass of its own, so that it is alone in memory.

    Args:
        passes: Where to.
        policy: The policy before the update.
        critic: Its critic's directory, of any kind.
        params: Of the iteration.
        same_model: Whether the policy is the reference.
    """
    kind = critic_kind(critic)
    passes.token_logprobs("logprobs", policy, critic if kind == "shared" else None)
    if kind == "separate":
        passes.values(critic)
    if not same_model:
        passes.token_logprobs("ref_logprobs", REFERENCE)
        if params.score.full_kl:
            passes.full_kl(policy, REFERENCE)
    run_reward_models(passes, reward_models(params.rewards, REWARD_MODEL))


def described(sources: list[Path], policy: Path, critic: Path, params: Params) -> dict[str, Any]:
    """Return the metadata of the new shards, after checking that the rollouts are this policy's and fit together."""
    own = sources[0]
    metadata = read_metadata(own)
    if metadata["policy"] != hash_path(policy):
        raise StaleInput(
            f"{own} was sampled from another policy than {policy}; run `dvc repro rollout@{metadata['iteration']}`"
        )
    if not any(read_shard(path, ["sample_id"]).num_rows for path in numbered(sources).values()):
        raise DataError(
            f"iteration {metadata['iteration']}: {', '.join(map(str, sources))} hold no response; raise"
            " rollout.prompts_per_iteration, or let score.replay name an iteration that sampled some"
        )
    for source in sources[1:]:
        check_replayed(source, metadata)
    metadata |= {"reference": hash_path(REFERENCE), "critic": hash_path(critic), "precision": params.compute.precision}
    models = described_models(params.rewards, REWARD_MODEL, group="rewards")
    inputs = {**metadata["inputs"], **{str(source): hash_path(source) for source in sources}}
    inputs |= {str(REFERENCE): metadata["reference"], str(critic): metadata["critic"]}
    inputs |= {str(path): models[name] for name, path in reward_models(params.rewards, REWARD_MODEL).items()}
    inputs |= described_inputs(params.rewards)
    metadata["reward_models"] = models
    return metadata | {"stage": "score", "inputs": inputs, "rewards": described_sources(params.rewards)}


def check_replayed(source: Path, own: dict[str, Any]) -> None:
    """Check that an earlier iteration's responses can be scored beside this one's.

    Raises:
        StaleInput: If they are another iteration's than their directory says, or were sampled by another tokenizer,
            with other EOS ids or at another temperature.
    """
    found = read_metadata(source)
    wanted = {"iteration": source.name.removeprefix("iteration=")}
    wanted |= {name: own[name] for name in ("tokenizer", "eos_ids", "temperature")}
    for name, expected in wanted.items():
        if found[name] != expected:
            raise StaleInput(
                f"{source}, replayed by iteration {own['iteration']}: {name} is {found[name]!r}, expected {expected!r};"
                f" run `dvc repro rollout@{wanted['iteration']}`, or take it out of score.replay"
            )


if __name__ == "__main__":
    keep_freed_memory()
    run_stage("score@" + sys.argv[1], main)
