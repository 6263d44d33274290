"""Train the reward model on data/preferences: `python -m stages.train_rm`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rlhf_core.algorithms.statistics import mean_and_std
from rlhf_core.artifacts.lineage import write_lineage
from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.shards import read_metadata, read_table
from rlhf_core.config import Params, TrainRmParams, load_run
from rlhf_core.disk import require_space
from rlhf_core.errors import DataError
from rlhf_core.models.checkpoint import MEASURED_SCORES, save_normalisation
from rlhf_core.models.checkpointing import checkpoint_layers
from rlhf_core.models.fusing import fuse_layers
from rlhf_core.models.loading import (
    local_directory,
    new_classifier,
    save_like,
    save_pretrained,
    tensor_bytes,
    torch_device,
)
from rlhf_core.models.memory import keep_freed_memory
from rlhf_core.models.reward_text import TextReader, text_ids, text_reader
from rlhf_core.models.tokenizer import load_tokenizer, pad_id
from rlhf_core.seeding import derive_seed
from rlhf_core.stage import publish, run_stage, work_directory, write_json
from rlhf_core.training.comparisons import Counted, Ranked, all_pairs, count, pair_places, whole_lists
from rlhf_core.training.distributed import join, launch
from rlhf_core.training.lora import add_adapters, head_parameters, merge
from rlhf_core.training.ranking import ranking
from rlhf_core.training.reward_model import Execution, Objective, Trained, freeze_lowest, scores, train
from rlhf_core.training.saves import Saves

PREFERENCES, OUT = Path("data/preferences"), Path("data/checkpoints/reward_model")
METRICS = Path("data/metrics/train_rm.json")
OBJECTIVE = {"loss", "margin_coef", "label_smoothing", "soft_labels", "centring_coef"}
LORA = {"lora_rank", "lora_alpha", "lora_targets"}
NOT_TRAINING = {"model", "frozen_layers", "ties", "checkpoint", "save_every", *LORA, *OBJECTIVE}


def main() -> None:
    """Train on the rows of split train, measure on those of split eval, save the classifier."""
    params = load_run().params
    rm, compute = params.train_rm, params.compute
    launch("stages.train_rm", compute.processes)
    source = Path("data/checkpoints/policy/0") if rm.model == "base" else local_directory(rm.model)
    processes, device = join(torch_device(compute.device))
    if not read_table(PREFERENCES, ["pair_id"]).num_rows:
        if processes.is_main:
            no_reward_model(work_directory("train_rm", fingerprint(params)))
        return
    work = processes.gathered(work_directory("train_rm", fingerprint(params)) if processes.is_main else Path())[0]
    seed, tokenizer = derive_seed(params.seed, "train_rm"), load_tokenizer(source)
    model = new_classifier(source, device=device, precision=compute.precision, seed=seed)
    model.config.pad_token_id = pad_id(tokenizer)
    own_tokenizer = hash_tokenizer(source) != read_metadata(PREFERENCES)["tokenizer"]
    reader = text_reader(model, tokenizer) if own_tokenizer else None
    rows, held_out = read_rows("train", reader), read_rows("eval", reader)
    freeze_lowest(model, rm.frozen_layers)
    adapted = adapters(model, rm, seed) if rm.lora_rank else None
    if compute.torch_compile:
        fuse_layers(model, compute.precision)
    checkpoint_layers(model, compute.gradient_checkpointing, compute.precision)
    execution = Execution(compute.max_batch_tokens, compute.precision, pad_id(tokenizer), processes)
    data = to_train_on(rows, rm)
    check_room(model, rm, steps=rm.epochs * -(-len(data.rows) // rm.batch_size))
    saves = Saves(work / "saves", rm.save_every, processes)
    trained = fit(model, data.rows, held_out, rm, execution, saves, seed)
    if adapted is not None:
        merge(adapted)
    measured = held_out or rows
    share = -(-sum(len(row.ranks) for row in measured) // processes.size)
    with tqdm(total=share, desc="held-out", unit="response", disable=not processes.is_main) as bar:
        found = scores(model, measured, execution, progress=bar.update)
    processes.leave()
    if not processes.is_main:
        return

    how = "Bradley-Terry" if rm.loss == "pairs" else "Plackett-Luce"
    unit = "pairs" if rm.loss == "pairs" else "ranked lists"
    card = f"# Reward model\n\n{how}, from `{rm.model}`, on {len(data.rows)} {unit} ({hash_path(PREFERENCES)}).\n"
    if adapted is not None:
        card += (
            f"\nTrained with LoRA of rank {rm.lora_rank}, alpha {rm.lora_alpha:g}; the adapters are in the weights.\n"
        )
    if own_tokenizer:
        save_pretrained(model, tokenizer, work / "model", card=card)  # written anew: it may have got a pad token
    else:
        save_like(model, source, work / "model", card=card)
    mean, std = save_scores(work / "model", measured, found, on="held-out" if held_out else "training")
    name = str(source) if rm.model == "base" else rm.model
    inputs = {str(PREFERENCES): hash_path(PREFERENCES), name: hash_path(source)}
    write_lineage(work / "model", stage="train_rm", inputs=inputs)
    publish(work / "model", OUT)
    metrics = ranking(held_out, found) | {"eval/raw_score_mean": mean, "eval/raw_score_std": std}
    write_json(METRICS, metrics | counts(data, held_out, trained))


def check_room(model: Any, rm: TrainRmParams, *, steps: int) -> None:
    """Check that there is room for the model and a save beside it, or for two saves, of which the first goes last.

    A save has weights and AdamW's two moments of what is trained, and the weights of the best epoch of several.
    """
    weights = tensor_bytes(model.parameters())
    save = (4 if rm.epochs > 1 else 3) * tensor_bytes(weight for weight in model.parameters() if weight.requires_grad)
    if 0 < rm.save_every <= steps:
        require_space(OUT, save + max(save, weights), "the reward model, or its training kept by train_rm.save_every,")
    else:
        require_space(OUT, weights, "the reward model")


def adapters(model: Any, rm: TrainRmParams, seed: int) -> Any:
    """Put adapters into the layers that are not frozen; they and the head are all that learns then."""
    whole = head_parameters(model)
    return add_adapters(model, rank=rm.lora_rank, alpha=rm.lora_alpha, targets=rm.lora_targets, whole=whole, seed=seed)


def fit(
    model: Any,
    rows: Sequence[Ranked],
    held_out: Sequence[Ranked],
    rm: TrainRmParams,
    execution: Execution,
    saves: Saves,
    seed: int,
) -> Trained:
    """Train the model with the parameters of train_rm, under a progress bar."""
    objective = Objective(**rm.model_dump(include=OBJECTIVE))
    options = rm.model_dump(exclude=NOT_TRAINING)
    judges = held_out if rm.checkpoint == "best" and any(map(pair_places, held_out)) else []
    steps = -(-len(rows) // rm.batch_size) * rm.epochs
    with tqdm(total=steps, desc="train_rm", unit="step", disable=not execution.processes.is_main) as bar:

        def show(loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update()

        return train(model, rows, judges, objective, execution, **options, seed=seed, progress=show, saves=saves)


def to_train_on(rows: Sequence[Ranked], rm: TrainRmParams) -> Counted:
    """Return the pairs, or the whole lists, that the loss is about.

    Raises:
        DataError: If none is left.
    """
    data = all_pairs(rows, ties=rm.ties) if rm.loss == "pairs" else whole_lists(rows)
    if not data.rows:
        raise DataError(
            f"{PREFERENCES}: none of {len(rows)} rows of split train says which response is better ({data.ties} pairs"
            f" are tied, {data.identical} are the same to the model after truncation); add pairs, or raise"
            " ingest.max_pair_tokens"
        )
    return data


def save_scores(
    directory: Path, rows: Sequence[Ranked], found: Sequence[np.ndarray], *, on: str
) -> tuple[float, float]:
    """Write the raw scores of the measured responses and the normalisation by them; return their mean and deviation."""
    mean, std = mean_and_std(np.concatenate(found))
    save_normalisation(directory, mean=mean, std=std, measured_on=f"all responses of {len(rows)} {on} rows")
    raw = {row.pair_id: own.tolist() for row, own in zip(rows, found, strict=True)}
    write_json(directory / MEASURED_SCORES, raw)
    return mean, std


def counts(data: Counted, held_out: Sequence[Ranked], trained: Trained) -> dict[str, float]:
    """Return the metrics of what was trained on, and what was left out."""
    ties, identical = count(held_out)
    return {
        "eval/ties_in_data": ties,
        "eval/identical_after_truncation": identical,
        "train/loss": trained.loss,
        "train/best_epoch": trained.best_epoch,
        "train/trained_parameters": trained.parameters,
        "train/skipped_steps": trained.skipped,
        "train/pairs": len(data.rows),
        "train/ties_in_data": data.ties,
        "train/identical_after_truncation": data.identical,
    }


def fingerprint(params: Params) -> dict[str, Any]:
    """Return what the reward model depends on."""
    parameters = params.model_dump(include={"train_rm", "compute", "seed"}, exclude={"train_rm": {"save_every"}})
    return {"preferences": hash_path(PREFERENCES), "params": parameters}


def read_rows(split: str, reader: TextReader | None) -> list[Ranked]:
    """Read the ranked responses of one split.

    Args:
        split: train or eval.
        reader: Of a model with a tokenizer of its own, which reads the texts; None = the ids that ingest made.
    """
    names = ["pair_id", "messages", "prompt", "prompt_ids", "responses", "response_ids", "ranks", "margin", "agreement"]
    ranked = []
    for row in read_table(PREFERENCES, [*names, "source", "split"]).to_pylist():
        if row["split"] != split:
            continue
        ids = [(row["prompt_ids"], response) for response in row["response_ids"]]
        if reader is not None:
            ids = [text_ids(reader, row["messages"] or row["prompt"], text) for text in row["responses"]]
        ranked.append(
            Ranked(
                pair_id=row["pair_id"],
                prompt=row["prompt"],
                source=row["source"],
                prompt_ids=[prompt for prompt, _ in ids],
                response_ids=[response for _, response in ids],
                ranks=row["ranks"],
                margin=row["margin"] or 0.0,
                agreement=row["agreement"],
            )
        )
    return ranked


def no_reward_model(work: Path) -> None:
    """Without preferences (ingest.preferences: null) the out is a directory that says so; no stage may then use it."""
    (work / "model").mkdir(exist_ok=True)
    (work / "model" / "README.md").write_text("No reward model: there are no preference pairs to train one on.\n")
    write_lineage(work / "model", stage="train_rm", inputs={str(PREFERENCES): hash_path(PREFERENCES)})
    publish(work / "model", OUT)
    write_json(METRICS, {"train/pairs": 0})


if __name__ == "__main__":
    keep_freed_memory()
    run_stage("train_rm", main)
