"""Train policy and critic on one iteration's responses: `python -m stages.ppo_update ITERATION PREV`."""

import csv
import shutil
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlhf_core.algorithms.conventions import CONVENTIONS
from rlhf_core.artifacts.lineage import write_lineage
from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.shards import read_metadata
from rlhf_core.config import Params, load_run
from rlhf_core.disk import require_space
from rlhf_core.errors import StaleInput
from rlhf_core.models.checkpoint import load_critic, load_optimizer, save_critic, save_optimizer
from rlhf_core.models.checkpointing import checkpoint_layers
from rlhf_core.models.fusing import fuse_layers
from rlhf_core.models.loading import load_causal_lm, save_like, tensor_bytes, torch_device
from rlhf_core.models.memory import keep_freed_memory
from rlhf_core.models.tokenizer import load_tokenizer, pad_id
from rlhf_core.seeding import derive_seed
from rlhf_core.stage import publish, run_stage, work_directory, write_json
from rlhf_core.training.distributed import Processes, join, launch
from rlhf_core.training.learner import LEARNER, Learner, new_learner
from rlhf_core.training.lora import merged, policy_adapters
from rlhf_core.training.ppo import step_count, update
from rlhf_core.training.ppo_loss import Settings
from rlhf_core.training.ppo_measures import explained_variance_after, kl_after, summary
from rlhf_core.training.responses import policy_card, read_responses
from rlhf_core.training.saves import Saves

CHECKPOINTS = Path("data/checkpoints")
NOT_RESULTS = {"max_kl", "save_every"}  # a killed run goes on whatever they are


def main() -> None:
    """Load the previous checkpoint, update it on data/advantages, and publish policy, critic and optimiser state."""
    iteration, prev = sys.argv[1:3]
    run = load_run()
    params = run.at(iteration)
    ppo, compute = params.ppo_update, params.compute
    launch("stages.ppo_update", compute.processes)
    critic_only = len(run.chain(iteration)) <= ppo.critic_warmup_iterations
    source = Path(f"data/advantages/iteration={iteration}")
    before = {name: CHECKPOINTS / name / prev for name in ("policy", "critic", "optimizer")}
    inputs = {str(path): hash_path(path) for path in (source, *before.values())}
    metadata = checked(source, inputs, before["policy"], before["critic"])
    processes, device = join(torch_device(compute.device))
    work = work_of(iteration, inputs, params, processes, critic_only=critic_only)
    policy = load_causal_lm(before["policy"], device=device, precision=compute.precision)
    critic = load_critic(before["critic"], policy=policy, device=device, precision=compute.precision)
    state = load_optimizer(before["optimizer"])
    responses, own = read_responses(
        source, iteration=iteration, old_logprobs=ppo.old_logprobs, critic=critic is not None
    )
    adapted = policy_adapters(policy, state, **lora_options(params))
    for model in (policy, *([critic.backbone] if critic is not None and critic.backbone is not None else [])):
        if compute.torch_compile:
            fuse_layers(model, compute.precision)
        checkpoint_layers(model, compute.gradient_checkpointing, compute.precision)
    learner = new_learner(policy, critic, state, critic_only=critic_only, **ppo.model_dump(include=LEARNER))
    settings = update_settings(params, metadata, iteration, pad_id(load_tokenizer(before["policy"])))
    steps = step_count(responses, settings)
    check_room(policy, critic, saved=0 < ppo.save_every <= steps)
    with tqdm(total=steps, desc="ppo_update", unit="step", disable=not processes.is_main) as bar:
        saves = Saves(work / "saves", ppo.save_every, processes)
        progress = update(learner, responses, settings, processes, lambda row: show(bar, row), saves)
    metrics = summary(progress) | {"episode": state.episode + own}
    if ppo.max_kl is not None and not critic_only:
        metrics["policy/approxkl_k3_after"] = kl_after(learner, responses, settings, processes)
    if critic is not None:
        metrics["val/explained_variance_after"] = explained_variance_after(learner, responses, settings, processes)
    processes.leave()
    if not processes.is_main:
        return

    card = policy_card(iteration, prev, inputs, ppo, critic_only)
    save_policy(learner, adapted, before["policy"], work / "policy", card)
    save_critic(critic, work / "critic")
    save_optimizer(learner.state(state, steps=len(progress.log), episode=state.episode + own), work / "optimizer")
    for name in ("policy", "critic", "optimizer"):
        write_lineage(work / name, stage="ppo_update", iteration=iteration, inputs=inputs)
        publish(work / name, CHECKPOINTS / name / iteration)
    write_json(Path(f"data/metrics/ppo_update/{iteration}.json"), metrics)
    write_steps(work / "steps.csv", progress.log)
    publish(work / "steps.csv", Path(f"data/plots/ppo_update/{iteration}.csv"))


def check_room(policy: Any, critic: Any, *, saved: bool) -> None:
    """Check that there is room for the weights, AdamW's two moments of each that is trained, and a save of all that."""
    weights = [*policy.parameters(), *(critic.parameters() if critic is not None else [])]
    trained = [weight for weight in weights if weight.requires_grad]
    needed = tensor_bytes(weights) + (2 + 3 * saved) * tensor_bytes(trained)
    what = "the new checkpoint with AdamW's two moments of each trained weight"
    require_space(CHECKPOINTS, needed, what + saved * ", kept a second time meanwhile (ppo_update.save_every),")


def checked(source: Path, inputs: dict[str, str], policy: Path, critic: Path) -> dict[str, Any]:
    """Return the shards' metadata after checking by all hashes that this policy and critic scored them."""
    metadata = read_metadata(source)
    for name, path in (("policy", policy), ("critic", critic)):
        if metadata[name] != inputs[str(path)]:
            raise StaleInput(
                f"{source} was made with another {name} than {path}; run `dvc repro advantages@{metadata['iteration']}`"
            )
    return metadata


def work_of(iteration: str, inputs: dict[str, str], params: Params, processes: Processes, *, critic_only: bool) -> Path:
    """Return the work directory, which the main process makes, in every process."""
    directory = Path()
    if processes.is_main:
        described = {"ppo_update": params.ppo_update.model_dump(exclude=NOT_RESULTS), "critic_only": critic_only}
        described |= {"compute": params.compute.model_dump(), "seed": params.seed}
        directory = work_directory(f"ppo_update@{iteration}", {"inputs": inputs, **described})
    return processes.gathered(directory)[0]


def update_settings(params: Params, metadata: dict[str, Any], iteration: str, pad: int) -> Settings:
    """Return what the update needs to know, from the parameters and from what the shards say of themselves."""
    ppo, fields = params.ppo_update, set(Settings.__annotations__)
    conventions = CONVENTIONS[metadata["conventions"]]
    return Settings(
        **{
            **ppo.model_dump(include=fields),
            **params.compute.model_dump(include=fields),
            "temperature": metadata["temperature"],
            "clip_range_high": ppo.clip_range_high or ppo.clip_range,
            "aggregation_constant": ppo.aggregation_constant or float(metadata["sampling"]["max_new_tokens"]),
            "value_loss_factor": conventions.value_loss_factor,
            "kl_estimate_bound": conventions.kl_bound(ppo.kl_loss_estimator),
            "iteration": iteration,
            "pad_id": pad,
            "seed": derive_seed(params.seed, "ppo_update", iteration),
        }
    )


def lora_options(params: Params) -> dict[str, Any]:
    """Return the adapters that the policy is trained by."""
    ppo, seed = params.ppo_update, derive_seed(params.seed, "ppo_update", "lora")
    return {"rank": ppo.lora_rank, "alpha": ppo.lora_alpha, "targets": ppo.lora_targets, "seed": seed}


def save_policy(learner: Learner, adapted: Any, source: Path, directory: Path, card: str) -> None:
    """Write the updated policy, its adapters merged, or a copy of the source where it was not trained."""
    if "policy" in learner.parts:
        policy = learner.policy
        if adapted is not None:
            policy = merged(adapted, load_causal_lm(source, device=torch_device("cpu"), precision="float32"))
        save_like(policy, source, directory, card=card)
        return
    shutil.copytree(source, directory, dirs_exist_ok=True)
    (directory / "README.md").write_text(card, encoding="utf-8")


def show(bar: "tqdm[Any]", row: dict[str, float]) -> None:
    """Advance the progress bar by one optimiser step."""
    bar.set_postfix(kl=f"{row['policy/approxkl_avg']:.4f}", clip=f"{row['policy/clipfrac_avg']:.2f}")
    bar.update()


def write_steps(path: Path, log: list[dict[str, float]]) -> None:
    """Write the metrics of every optimiser step as CSV, for `dvc plots`."""
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, ["step", *log[0]])
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in enumerate(log, start=1))


if __name__ == "__main__":
    keep_freed_memory()
    run_stage("ppo_update@" + sys.argv[1], main)
