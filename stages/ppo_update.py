"""Train policy and critic on one iteration's responses: `python -m stages.ppo_update ITERATION PREV`."""

import csv
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.shards import read_metadata
from rlhf_core.config import load_run
from rlhf_core.errors import StaleInput
from rlhf_core.models.checkpoint import load_critic, load_optimizer, save_critic, save_optimizer
from rlhf_core.models.loading import load_causal_lm, save_like, torch_device
from rlhf_core.models.tokenizer import load_tokenizer, pad_id
from rlhf_core.seeding import derive_seed
from rlhf_core.stage import publish, run_stage, work_directory, write_json
from rlhf_core.training.optimizer import adamw, captured, restore, schedule, trainable
from rlhf_core.training.ppo import Settings, summary, update
from rlhf_core.training.responses import explained_variance_after, policy_card, read_responses

CHECKPOINTS = Path("data/checkpoints")


def main() -> None:
    """Load the previous checkpoint, update it on data/advantages, and publish policy, critic and optimiser state."""
    iteration, prev = sys.argv[1:3]
    params = load_run().at(iteration)
    ppo, compute = params.ppo_update, params.compute
    source = Path(f"data/advantages/iteration={iteration}")
    before = {name: CHECKPOINTS / name / prev for name in ("policy", "critic", "optimizer")}
    metadata = checked(source, before["policy"], before["critic"])
    inputs = {"advantages": hash_path(source), **{name: hash_path(path) for name, path in before.items()}}
    work = work_directory(
        f"ppo_update@{iteration}", {"inputs": inputs, "ppo_update": ppo.model_dump(), "compute": compute.model_dump()}
    )
    responses, empty = read_responses(source)

    device = torch_device(compute.device)
    policy = load_causal_lm(before["policy"], device=device, precision=compute.precision)
    head = load_critic(before["critic"], hidden_size=policy.config.get_text_config().hidden_size, device=device)
    state = load_optimizer(before["optimizer"])
    trunk, value_head = trainable(policy, "policy"), trainable(head, "value_head")
    groups = [(trunk, ppo.learning_rate), (value_head, ppo.value_head_learning_rate)]
    optimizer = adamw(groups, betas=ppo.adam_betas, eps=ppo.adam_eps, weight_decay=ppo.weight_decay)
    restore(optimizer, [*trunk, *value_head], state)
    scheduler = schedule(
        optimizer,
        name=ppo.lr_schedule,
        warmup_steps=ppo.warmup_steps,
        total_steps=ppo.schedule_steps,
        first_step=state.step,
    )
    settings = Settings(
        temperature=metadata["temperature"],
        pad_id=pad_id(load_tokenizer(before["policy"])),
        seed=derive_seed(params.seed, "ppo_update", iteration),
        **ppo.model_dump(include=set(Settings.__annotations__)),
        **compute.model_dump(include=set(Settings.__annotations__)),
    )
    steps = ppo.ppo_epochs * -(-len(responses.sample_ids) // ppo.minibatch_size)
    with tqdm(total=steps, desc="ppo_update", unit="step") as bar:
        log = update(policy, head, responses, optimizer, scheduler, settings, lambda row: show(bar, row))

    episode = state.episode + len(responses.sample_ids) + empty
    metrics = summary(log) | {
        "episode": episode,
        "val/explained_variance_after": explained_variance_after(policy, head, responses, settings),
    }
    save_like(policy, before["policy"], work / "policy", card=policy_card(iteration, prev, inputs, params.ppo_update))
    save_critic(head, work / "critic")
    save_optimizer(
        captured(optimizer, [*trunk, *value_head], step=state.step + len(log), episode=episode), work / "optimizer"
    )
    for name in ("policy", "critic", "optimizer"):
        publish(work / name, CHECKPOINTS / name / iteration)
    write_json(Path(f"data/metrics/ppo_update/{iteration}.json"), metrics)
    write_steps(Path(f"data/plots/ppo_update/{iteration}.csv"), log)


def checked(source: Path, policy: Path, critic: Path) -> dict[str, Any]:
    """Return the shards' metadata after checking that they were scored with this policy and critic."""
    metadata = read_metadata(source)
    for name, path in (("policy", policy), ("critic", critic)):
        if metadata[name] != hash_path(path):
            raise StaleInput(
                f"{source} was made with another {name} than {path}; run `dvc repro advantages@{metadata['iteration']}`"
            )
    return metadata


def show(bar: "tqdm[Any]", row: dict[str, float]) -> None:
    """Advance the progress bar by one optimiser step."""
    bar.set_postfix(
        kl=f"{row['policy/approxkl_avg']:.4f}",
        clip=f"{row['policy/clipfrac_avg']:.2f}",
        value=f"{row['loss/value_avg']:.3f}",
    )
    bar.update()


def write_steps(path: Path, log: list[dict[str, float]]) -> None:
    """Write the metrics of every optimiser step as CSV, for `dvc plots`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, ["step", *log[0]])
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in enumerate(log, start=1))


if __name__ == "__main__":
    run_stage("ppo_update@" + sys.argv[1], main)
