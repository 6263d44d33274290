"""The forward passes of the score and evaluate stages: one model in memory at a time, resumable shard by shard.

Each pass writes one flat array per shard into the work directory; a pass that finds all of its arrays there loads no
model. The peak memory is the largest model (two for the full KL) plus one batch, whatever the number of rows.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from rlhf_core.artifacts.schema import outcome_column, score_column
from rlhf_core.artifacts.shards import read_shard, shard_name, shard_paths
from rlhf_core.disk import writing
from rlhf_core.errors import AnswerError, NumericError, RewardError
from rlhf_core.models.batching import Batch
from rlhf_core.models.checkpoint import load_critic, load_normalisation
from rlhf_core.models.forward import (
    critic_values,
    for_all_rows,
    full_kl,
    sequence_scores,
    token_outputs,
    without_pads,
)
from rlhf_core.models.frozen import round_weights
from rlhf_core.models.loading import load_causal_lm, load_classifier, torch_device
from rlhf_core.models.memory import TokenBudget
from rlhf_core.reward.inputs import ReadsRows, policy_ids, reward_inputs, within_bounds
from rlhf_core.reward.rows import DROP_HINT, Row, checked_scores, row_dictionaries
from rlhf_core.stage import write_json

Compute = Callable[[Batch], list[Tensor]]


def numbered(directories: Sequence[Path]) -> dict[str, Path]:
    """Return the shards of several artifacts as if they were one: name in the whole -> file, in order."""
    paths = [path for directory in directories for path in shard_paths(directory)]
    return {shard_name(number): path for number, path in enumerate(paths)}


@dataclass(frozen=True)
class Passes:
    """Where passes read and write, and how they run."""

    shards: Mapping[str, Path]  # from numbered: files of the rollouts schema (or one that begins with it)
    prompts: Path  # data/prompts; read only for a reward model with another tokenizer, which reads texts
    work: Path  # one directory per pass is made here
    device: str  # compute.device
    precision: str  # compute.precision
    max_batch_tokens: int
    logits_chunk_tokens: int
    temperature: float  # of the distribution that logprobs are taken under
    pad_id: int
    eos_ids: list[int]
    nonfinite_scores: Literal["error", "drop"] = (
        "error"  # score.nonfinite_scores; drop leaves a NaN where one was found
    )

    def token_logprobs(self, name: str, policy: Path, critic: Path | None = None) -> None:
        """Write the logprob of every response token under a policy, and its shared critic's values where it has one.

        Args:
            name: Of the pass; arrays go to work/<name>/<shard>.npy, values as in `values`.
            policy: A causal language model directory.
            critic: A shared critic that reads this policy's states, or None.
        """
        if self._done(name) and (critic is None or self._done("values")):
            return
        device = torch_device(self.device)
        model = load_causal_lm(policy, device=device, precision=self.precision)
        round_weights(model, self.precision)
        shared = None
        if critic is not None:
            shared = load_critic(critic, policy=model, device=device, precision=self.precision)

        def compute(batch: Batch) -> list[Tensor]:
            outputs = token_outputs(
                model,
                batch,
                temperature=self.temperature,
                logits_chunk_tokens=self.logits_chunk_tokens,
                precision=self.precision,
                critic=shared,
            )
            logprobs = outputs.logprobs.split(batch.lengths)
            if outputs.values is None or outputs.bootstrap_values is None:
                return list(logprobs)
            values = _with_bootstrap(outputs.values, outputs.bootstrap_values, batch)
            return [torch.cat(row) for row in zip(logprobs, values, strict=True)]

        for shard, rows in self._run(name, compute, device, policy_ids, packed=without_pads(model), pad_id=self.pad_id):
            if shared is not None:
                # A row is T logprobs and T + 1 values.
                self._save_values(shard, [row[len(row) // 2 :] for row in rows])
                rows = [row[: len(row) // 2] for row in rows]
            save_array(self.work / name / f"{shard}.npy", _flat(rows))

    def values(self, critic: Path) -> None:
        """Write a separate critic's V before every response token, and after every response.

        Args:
            critic: Its directory. Arrays go to work/values/<shard>.npy, flat over tokens, and, one number for each row,
                to work/bootstrap_value/<shard>.npy.

        Raises:
            ModelError: If the critic has no embedding or position for what is in a row.
        """
        if self._done("values"):
            return
        device = torch_device(self.device)
        model = load_critic(critic, policy=None, device=device, precision=self.precision)
        assert model is not None and model.backbone is not None
        round_weights(model.backbone, self.precision)

        def compute(batch: Batch) -> list[Tensor]:
            return _with_bootstrap(*critic_values(model, batch, None, precision=self.precision), batch)

        read = within_bounds(policy_ids, model.backbone, critic)
        for shard, rows in self._run(
            "values", compute, device, read, packed=without_pads(model.backbone), pad_id=self.pad_id
        ):
            self._save_values(shard, rows)

    def full_kl(self, policy: Path, reference: Path) -> None:
        """Write KL(policy || reference) over the whole vocabulary at every response token to work/full_kl/<shard>.npy.

        The only pass with two models in memory.
        """
        if self._done("full_kl"):
            return
        device = torch_device(self.device)
        p, q = (load_causal_lm(path, device=device, precision=self.precision) for path in (policy, reference))
        for model in (p, q):
            round_weights(model, self.precision)

        def compute(batch: Batch) -> list[Tensor]:
            found = full_kl(
                p,
                q,
                batch,
                temperature=self.temperature,
                logits_chunk_tokens=self.logits_chunk_tokens,
                precision=self.precision,
            )
            return list(found.split(batch.lengths))

        for shard, rows in self._run(
            "full_kl", compute, device, policy_ids, packed=without_pads(p, q), pad_id=self.pad_id
        ):
            save_array(self.work / "full_kl" / f"{shard}.npy", _flat(rows))

    def reward_model(self, name: str, directory: Path) -> None:
        """Write a reward model's normalised score of every row to work/<name>/<shard>.npy.

            score = (raw - mean) / std, with the mean and deviation that train_rm stored

        With the policy's tokenizer it reads prompt and response ids, with another one the texts. A response that was
        cut off is closed by an EOS for it (not in any artifact), because closed turns are what it was trained on; that
        it was cut off is the missing-EOS penalty's business.
        """
        if self._done(name):
            return
        device = torch_device(self.device)
        model = load_classifier(directory, device=device, precision=self.precision)
        round_weights(model, self.precision)
        mean, std = load_normalisation(directory)
        first = next(iter(self.shards.values()))
        read, pad = reward_inputs(
            directory, model, shard=first, prompts=self.prompts, eos_ids=self.eos_ids, pad_id=self.pad_id
        )

        def compute(batch: Batch) -> list[Tensor]:
            return list((sequence_scores(model, batch, precision=self.precision) - mean) / std)

        for shard, scores in self._run(name, compute, device, read, packed=without_pads(model), pad_id=pad):
            array = np.array([float(score) if torch.isfinite(score) else np.nan for score in scores], np.float32)
            save_array(self.work / name / f"{shard}.npy", array)

    def rows(self, name: str, score: Callable[[list[Row], str, str], Any]) -> None:
        """Write a score without a model for every row to work/<name>/<shard>.npy.

        Args:
            name: Of the pass, which is the source's column.
            score: From all rows of a shard, the shard's name, and words for messages that name source and file, to one
                number for each row.

        Raises:
            RewardError: If it returns anything else; with source, file, row and value.
        """
        for shard, path in self.shards.items():
            if self._finished(name, shard):
                continue
            rows = row_dictionaries(path)
            where = f"reward source {name.removeprefix(score_column(''))}, {path}"
            found = score(rows, shard, where) if rows else []
            try:
                scores = checked_scores(found, [row["sample_id"] for row in rows], nonfinite=self.nonfinite_scores)
            except AnswerError as error:
                raise RewardError(f"{where}: {error}") from None
            save_array(self.work / name / f"{shard}.npy", np.array(scores, np.float32))

    def kept(self, name: str, shard: str) -> Path:
        """Return the file for what a pass has scored of a shard that it has not finished."""
        return self.work / name / f"{shard}.kept.jsonl"

    def save_outcomes(self, source: str, shard: str, outcomes: list[str]) -> None:
        """Write how a source's rows of a shard ended, one word each."""
        write_json(self.work / outcome_column(source) / f"{shard}.json", outcomes)

    def outcomes(self, source: str, shard: str) -> list[str] | None:
        """Return what save_outcomes wrote; None for a source without outcomes."""
        path = self.work / outcome_column(source) / f"{shard}.json"
        if not path.parent.is_dir():
            return None
        found: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return found

    def result(self, name: str, shard: str) -> np.ndarray:
        """Return what a pass wrote for one shard: float32, flat over its tokens, or one per row."""
        return np.load(self.work / name / f"{shard}.npy", allow_pickle=False)

    def has(self, name: str) -> bool:
        """Whether a pass of this name has run."""
        return (self.work / name).is_dir()

    def _done(self, name: str) -> bool:
        return all(self._finished(name, shard) for shard in self.shards)

    def _finished(self, name: str, shard: str) -> bool:
        """Whether a pass has done a shard. What is to be finite now may have been let through as NaN before."""
        if not (self.work / name / f"{shard}.npy").is_file():
            return False
        return self.nonfinite_scores == "drop" or bool(np.isfinite(self.result(name, shard)).all())

    def _save_values(self, shard: str, rows: list[Tensor]) -> None:
        """Write a shard's values and bootstrap values, of rows [T + 1]; values last: they tell that it is done."""
        save_array(self.work / "bootstrap_value" / f"{shard}.npy", np.array([float(row[-1]) for row in rows]))
        save_array(self.work / "values" / f"{shard}.npy", _flat([row[:-1] for row in rows]))

    def _run(
        self, name: str, compute: Compute, device: torch.device, rows_of: ReadsRows, *, packed: bool, pad_id: int
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (shard name, results per row) for each shard that this pass has not finished."""
        total = sum(read_shard(path, ["sample_id"]).num_rows for path in self.shards.values())
        budget = TokenBudget(self.max_batch_tokens)  # each model's own: what one has no room for, another may have
        with progress_bar(name, total) as advance:
            for shard, path in self.shards.items():
                table = read_shard(path, ["sample_id"])
                if self._finished(name, shard):
                    advance(table.num_rows)
                    continue
                results = for_all_rows(
                    compute,
                    *rows_of(path),
                    packed=packed,
                    budget=budget,
                    pad_id=pad_id,
                    device=device,
                    progress=advance,
                )
                is_score = name.startswith(score_column(""))
                if not (is_score and self.nonfinite_scores == "drop"):
                    hint = f" ({DROP_HINT})" if is_score else ""
                    _require_finite(results, table["sample_id"].to_pylist(), f"{path}: {name}", hint)
                yield shard, results


def _require_finite(results: Sequence[Tensor], sample_ids: Sequence[str], where: str, hint: str) -> None:
    for sample_id, result in zip(sample_ids, results, strict=True):
        if not torch.isfinite(result).all():
            raise NumericError(
                f"{where} of sample {sample_id} is not finite; expected finite numbers from the model. Look at the row"
                f" with `rlhf inspect`, and at the model's weights{hint}"
            )


def _with_bootstrap(values: Tensor, bootstrap_values: Tensor, batch: Batch) -> list[Tensor]:
    """Rows [T + 1]: the values of a response's tokens, then the value after it."""
    after = bootstrap_values.split(1)
    return [torch.cat(row) for row in zip(values.split(batch.lengths), after, strict=True)]


def _flat(rows: list[Tensor]) -> np.ndarray:
    return np.concatenate([row.numpy() for row in rows]) if rows else np.zeros(0, np.float32)


@contextmanager
def progress_bar(name: str, rows: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over rows and give the function that advances it."""
    with tqdm(total=rows, desc=name, unit="response") as bar:
        yield lambda done: (bar.update(done), None)[1]


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a float32 array whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(temporary, needed=4 * array.size), temporary.open("wb") as handle:
        np.save(handle, array.astype(np.float32), allow_pickle=False)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
