"""Train the reward model on data/preferences: `python -m stages.train_rm`."""

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rlhf_core.algorithms.statistics import mean_and_std
from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.shards import read_metadata, read_table
from rlhf_core.config import Params, load_run
from rlhf_core.errors import ModelError
from rlhf_core.models.checkpoint import save_normalisation
from rlhf_core.models.loading import local_directory, new_classifier, save_like, torch_device
from rlhf_core.models.tokenizer import load_tokenizer, pad_id
from rlhf_core.seeding import derive_seed
from rlhf_core.stage import publish, run_stage, work_directory, write_json
from rlhf_core.training.distributed import join, launch
from rlhf_core.training.reward_model import Pairs, expand_ranks, freeze_lowest, ranking, scores, train

PREFERENCES, OUT = Path("data/preferences"), Path("data/checkpoints/reward_model")
METRICS = Path("data/metrics/train_rm.json")


def main() -> None:
    """Train on the pairs of split train, measure on those of split eval, save the classifier."""
    params = load_run().params
    rm, compute = params.train_rm, params.compute
    launch("stages.train_rm", compute.processes)
    source = Path("data/checkpoints/policy/0") if rm.model == "base" else local_directory(rm.model)
    if hash_tokenizer(source) != read_metadata(PREFERENCES)["tokenizer"]:
        raise ModelError(
            f"train_rm.model {source}: its tokenizer is not the base model's; data/preferences holds the latter's ids"
        )
    processes, device = join(torch_device(compute.device))
    pairs, held_out = read_pairs("train"), read_pairs("eval")
    measured = held_out if held_out.pair_ids else pairs
    if not pairs.pair_ids:
        if processes.is_main:
            no_reward_model(work_directory("train_rm", fingerprint(params)))
        return
    seed = derive_seed(params.seed, "train_rm")
    model = new_classifier(source, device=device, precision=compute.precision, seed=seed)
    model.config.pad_token_id = pad_id(load_tokenizer(source))
    freeze_lowest(model, rm.frozen_layers)
    shared: dict[str, Any] = {
        "max_batch_tokens": compute.max_batch_tokens,
        "precision": compute.precision,
        "pad_id": model.config.pad_token_id,
        "processes": processes,
    }
    steps = -(-len(pairs.pair_ids) // rm.batch_size) * rm.epochs
    with tqdm(total=steps, desc="train_rm", unit="step", disable=not processes.is_main) as bar:
        options = rm.model_dump(exclude={"model", "frozen_layers"})
        loss = train(model, pairs, **options, **shared, seed=seed, progress=lambda loss: show(bar, loss))
    share = 2 * -(-len(measured.pair_ids) // processes.size)
    with tqdm(total=share, desc="held-out", unit="response", disable=not processes.is_main) as bar:
        chosen, rejected = scores(model, measured, **shared, progress=bar.update)
    processes.leave()
    if not processes.is_main:
        return
    work = work_directory("train_rm", fingerprint(params))
    metrics = ranking(held_out, chosen, rejected)
    mean, std = mean_and_std(np.concatenate([chosen, rejected]))
    metrics |= {
        "eval/score_mean": mean,
        "eval/score_std": std,
        "eval/ties_in_data": held_out.ties,
        "train/loss": loss,
        "train/pairs": len(pairs.pair_ids),
        "train/ties_in_data": pairs.ties,
    }
    data = f"{len(pairs.pair_ids)} pairs ({hash_path(PREFERENCES)})"
    card = f"# Reward model\n\nBradley-Terry, from `{rm.model}`, on {data}.\n"
    save_like(model, source, work / "model", card=card)
    named = f"both responses of {len(measured.pair_ids)} {'held-out' if held_out.pair_ids else 'training'} pairs"
    save_normalisation(work / "model", mean=mean, std=std, measured_on=named)
    publish(work / "model", OUT)
    write_json(METRICS, metrics)


def fingerprint(params: Params) -> dict[str, Any]:
    """Return what the reward model depends on."""
    parameters = params.model_dump(include={"train_rm", "compute", "seed"})
    return {"preferences": hash_path(PREFERENCES), "params": parameters}


def show(bar: "tqdm[Any]", loss: float) -> None:
    """Advance the progress bar by one optimiser step."""
    bar.set_postfix(loss=f"{loss:.3f}")
    bar.update()


def read_pairs(split: str) -> Pairs:
    """Read the pairs of one split."""
    table = read_table(PREFERENCES, ["pair_id", "prompt_ids", "response_ids", "ranks", "split"])
    rows = [row for row in table.to_pylist() if row["split"] == split]
    return expand_ranks(*([row[name] for row in rows] for name in ("pair_id", "prompt_ids", "response_ids", "ranks")))


def no_reward_model(work: Path) -> None:
    """Without preferences (ingest.preferences: null) the out is a directory that says so; no stage may then use it."""
    (work / "model").mkdir(exist_ok=True)
    (work / "model" / "README.md").write_text("No reward model: there are no preference pairs to train one on.\n")
    publish(work / "model", OUT)
    write_json(METRICS, {"train/pairs": 0})


if __name__ == "__main__":
    run_stage("train_rm", main)
