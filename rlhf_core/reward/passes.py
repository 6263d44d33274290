"""The forward passes of the score and evaluate stages: one model in memory at a time, resumable shard by shard.

Each pass writes one flat array per shard into the work directory; a pass that finds all of its arrays there loads no
model. The peak memory is the largest model plus one batch, whatever the number of rows.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from rlhf_core.artifacts.shards import read_shard, shard_paths
from rlhf_core.errors import NumericError
from rlhf_core.models.batching import Batch
from rlhf_core.models.checkpoint import load_critic, load_normalisation
from rlhf_core.models.forward import for_all_rows, sequence_scores, token_outputs
from rlhf_core.models.loading import load_causal_lm, load_classifier, torch_device
from rlhf_core.reward.judge import judge

Compute = Callable[[Batch], list[Tensor]]


@dataclass(frozen=True)
class Passes:
    """Where passes read and write, and how they run."""

    source: Path  # shards of the rollouts schema (or one that begins with it)
    work: Path  # one directory per pass is made here
    device: str  # compute.device
    precision: str  # compute.precision
    max_batch_tokens: int
    logits_chunk_tokens: int
    temperature: float  # of the distribution that logprobs are taken under
    pad_id: int
    eos_ids: list[int]

    def token_logprobs(self, name: str, policy: Path, critic: Path | None = None) -> None:
        """Write logprobs (and values, with a critic) of every response token under a policy.

        Args:
            name: Of the pass; arrays go to work/name/<shard>.npy, values to work/name-values/<shard>.npy.
            policy: A causal language model directory.
            critic: A value head for that policy, or None.
        """
        if self._done(name) and (critic is None or self._done(f"{name}-values")):
            return
        device = torch_device(self.device)
        model = load_causal_lm(policy, device=device, precision=self.precision)
        hidden_size = model.config.get_text_config().hidden_size
        head = None if critic is None else load_critic(critic, hidden_size=hidden_size, device=device)

        def compute(batch: Batch) -> list[Tensor]:
            outputs = token_outputs(
                model,
                batch,
                temperature=self.temperature,
                logits_chunk_tokens=self.logits_chunk_tokens,
                precision=self.precision,
                value_head=head,
            )
            values = outputs.values if outputs.values is not None else torch.zeros_like(outputs.logprobs)
            return list(torch.stack([outputs.logprobs, values], dim=1).split(batch.lengths))

        for shard, rows in self._run(name, compute, device, closed=False):
            both = np.concatenate([row.numpy() for row in rows]) if rows else np.zeros((0, 2), np.float32)
            if critic is not None:
                save_array(self.work / f"{name}-values" / f"{shard}.npy", both[:, 1])
            save_array(self.work / name / f"{shard}.npy", both[:, 0])

    def reward_model(self, directory: Path) -> None:
        """Write the reward model's normalised score of every row to work/reward_model/<shard>.npy.

            score = (raw - mean) / std, with the mean and deviation that train_rm stored

        It reads prompt and response ids. A response that was cut off is closed by an EOS for it (not in any artifact),
        because closed turns are what it was trained on; that it was cut off is the missing-EOS penalty's business.
        """
        if self._done("reward_model"):
            return
        device = torch_device(self.device)
        model = load_classifier(directory, device=device, precision=self.precision)
        mean, std = load_normalisation(directory)

        def compute(batch: Batch) -> list[Tensor]:
            return list((sequence_scores(model, batch, precision=self.precision) - mean) / std)

        for shard, rows in self._run("reward_model", compute, device, closed=True):
            save_array(self.work / "reward_model" / f"{shard}.npy", np.array([float(row) for row in rows], np.float32))

    def judge(self) -> None:
        """Write the judge's score of every row to work/judge/<shard>.npy."""
        for path in shard_paths(self.source):
            table = read_shard(path, ["response", "finish_reason"])
            scores = [judge(row["response"], row["finish_reason"]) for row in table.to_pylist()]
            save_array(self.work / "judge" / f"{path.name}.npy", np.array(scores, np.float32))

    def result(self, name: str, shard: str) -> np.ndarray:
        """Return what a pass wrote for one shard: float32, flat over its tokens, or one per row."""
        return np.load(self.work / name / f"{shard}.npy", allow_pickle=False)

    def _done(self, name: str) -> bool:
        return all((self.work / name / f"{path.name}.npy").is_file() for path in shard_paths(self.source))

    def _run(
        self, name: str, compute: Compute, device: torch.device, *, closed: bool
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (shard name, results per row) for each shard that this pass has not finished."""
        paths = shard_paths(self.source)
        with progress_bar(name, sum(read_shard(path, ["sample_id"]).num_rows for path in paths)) as advance:
            for path in paths:
                table = read_shard(path, ["sample_id", "prompt_ids", "response_ids"])
                if (self.work / name / f"{path.name}.npy").is_file():
                    advance(table.num_rows)
                    continue
                responses = table["response_ids"].to_pylist()
                if closed:
                    closing = self.eos_ids[0]
                    responses = [ids if ids and ids[-1] in self.eos_ids else [*ids, closing] for ids in responses]
                results = for_all_rows(
                    compute,
                    table["prompt_ids"].to_pylist(),
                    responses,
                    max_batch_tokens=self.max_batch_tokens,
                    pad_id=self.pad_id,
                    device=device,
                    progress=advance,
                )
                for sample_id, result in zip(table["sample_id"].to_pylist(), results, strict=True):
                    if not torch.isfinite(result).all():
                        raise NumericError(
                            f"{path}: {name} of sample {sample_id} is not finite; expected finite"
                            f" numbers from the model."
                            " Look at the row with `rlhf inspect`, and at the model's weights"
                        )
                yield path.name, results


@contextmanager
def progress_bar(name: str, rows: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over rows and give the function that advances it."""
    with tqdm(total=rows, desc=name, unit="response") as bar:
        yield lambda done: (bar.update(done), None)[1]


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a float32 array whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as handle:
        np.save(handle, array.astype(np.float32), allow_pickle=False)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
