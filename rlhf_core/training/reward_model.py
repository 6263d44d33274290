"""Reward model training: Bradley-Terry on preference pairs, and how well it ranks held-out ones.

Left out: files (stages/train_rm.py).
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.algorithms.losses import pairwise_loss
from rlhf_core.algorithms.statistics import pair_statistics
from rlhf_core.errors import ConfigError, NumericError
from rlhf_core.models.batching import Batch, collate, token_budget_batches
from rlhf_core.models.forward import for_all_rows, sequence_scores
from rlhf_core.training.distributed import Processes
from rlhf_core.training.minibatches import minibatches
from rlhf_core.training.optimizer import adamw, clip_and_step, schedule, trainable

logger = logging.getLogger("rlhf")

_CALIBRATION_BINS = 10  # the usual number for the expected calibration error


@dataclass(frozen=True)
class Pairs:
    """Preference pairs: a response that was preferred and one that was not, to the same prompt."""

    pair_ids: list[str]  # [B]
    prompt_ids: list[list[int]]  # [B]
    chosen_ids: list[list[int]]  # [B], closed by an EOS
    rejected_ids: list[list[int]]  # [B], closed by an EOS
    ties: int  # pairs of equal rank, which have no preferred response: counted, not trained on


def expand_ranks(
    pair_ids: Sequence[str],
    prompt_ids: Sequence[list[int]],
    response_ids: Sequence[list[list[int]]],
    ranks: Sequence[list[int]],
) -> Pairs:
    """Turn ranked lists into all their pairs of unequal rank, best first.

    Args:
        pair_ids: [B].
        prompt_ids: [B].
        response_ids: [B], two or more responses each.
        ranks: [B], one per response, 0 = best.
    """
    pairs = Pairs([], [], [], [], 0)
    ties = 0
    for pair_id, prompt, responses, rank in zip(pair_ids, prompt_ids, response_ids, ranks, strict=True):
        for first in range(len(responses)):
            for second in range(first + 1, len(responses)):
                if rank[first] == rank[second]:
                    ties += 1
                    continue
                better, worse = (first, second) if rank[first] < rank[second] else (second, first)
                pairs.pair_ids.append(pair_id)
                pairs.prompt_ids.append(prompt)
                pairs.chosen_ids.append(responses[better])
                pairs.rejected_ids.append(responses[worse])
    return Pairs(pairs.pair_ids, pairs.prompt_ids, pairs.chosen_ids, pairs.rejected_ids, ties)


def freeze_lowest(model: PreTrainedModel, layers: int) -> None:
    """Freeze the embeddings and the lowest transformer layers of a classifier; 0 freezes nothing.

    Raises:
        ConfigError: If the model has no more layers than that.
    """
    if layers == 0:
        return
    stacks = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    stack = max(stacks, key=len, default=None)
    if stack is None or layers > len(stack):
        raise ConfigError(
            f"train_rm.frozen_layers is {layers}, but the model has {0 if stack is None else len(stack)} layers"
        )
    for module in (model.get_input_embeddings(), *stack[:layers]):
        module.requires_grad_(False)


def train(
    model: PreTrainedModel,
    pairs: Pairs,
    *,
    learning_rate: float,
    weight_decay: float,
    warmup_fraction: float,
    epochs: int,
    batch_size: int,
    max_grad_norm: float,
    adam_betas: Sequence[float],
    adam_eps: float,
    max_batch_tokens: int,
    precision: str,
    pad_id: int,
    seed: int,
    processes: Processes,
    progress: Callable[[float], None],
) -> float:
    """Train a sequence classifier in place on pairs and return the mean loss of its last epoch's steps.

        loss = mean over the batch's pairs of -log sigmoid(score(chosen) - score(rejected))

    The gradient is that of the whole batch, however it is split by the token budget and over processes. Dropout stays
    off.

    Args:
        model: One label; frozen parameters stay as they are.
        pairs: At least one.
        learning_rate: AdamW; linear warm-up, then linear decay to 0.
        weight_decay: AdamW.
        warmup_fraction: Of all steps.
        epochs: Passes over the pairs.
        batch_size: Pairs per optimiser step.
        max_grad_norm: Global 2-norm.
        adam_betas: Decay of the first and second moments.
        adam_eps: Added to the root of the second moment.
        max_batch_tokens: Padded tokens of one forward pass.
        precision: compute.precision.
        pad_id: For padding.
        seed: Of the order of the pairs.
        processes: That share the pairs of each batch.
        progress: Told the loss after each step.

    Raises:
        NumericError: If a loss or gradient is not finite.
    """
    named = trainable(model, "reward_model")
    optimizer = adamw([(named, learning_rate)], betas=adam_betas, eps=adam_eps, weight_decay=weight_decay)
    batches = list(minibatches(len(pairs.pair_ids), epochs=epochs, minibatch_size=batch_size, seed=seed))
    warmup = math.ceil(warmup_fraction * len(batches))
    scheduler = schedule(optimizer, name="linear", warmup_steps=warmup, total_steps=len(batches) + 1, first_step=0)
    parameters = [parameter for _, parameter in named]
    longest = _longest(pairs)
    losses = []
    for step, rows in enumerate(batches):
        share = [rows[place] for place in processes.share([longest[row] for row in rows])]
        with processes.together():
            total = _accumulate(
                model,
                pairs,
                share,
                batch_size=len(rows),
                max_batch_tokens=max_batch_tokens,
                precision=precision,
                pad_id=pad_id,
            )
            if not math.isfinite(total):
                raise NumericError(f"{_where(step, pairs, share)}: the loss is {total}; the step was not taken")
        processes.add_gradients(parameters)
        loss = sum(processes.gathered(total))
        where = _where(step, pairs, rows)
        clip_and_step(optimizer, scheduler, {"grad_norm": parameters}, max_grad_norm=max_grad_norm, where=where)
        losses.append(loss)
        progress(loss)
    return float(np.mean(losses[-max(len(batches) // epochs, 1) :]))


def _longest(pairs: Pairs) -> list[int]:
    """Tokens of each pair's prompt with the longer of its responses, [B]."""
    columns = zip(pairs.prompt_ids, pairs.chosen_ids, pairs.rejected_ids, strict=True)
    return [len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected in columns]


def _where(step: int, pairs: Pairs, rows: list[int]) -> str:
    return f"optimiser step {step + 1}, pairs {', '.join(pairs.pair_ids[row] for row in rows[:4])}, ..."


def _accumulate(
    model: PreTrainedModel,
    pairs: Pairs,
    rows: list[int],
    *,
    batch_size: int,
    max_batch_tokens: int,
    precision: str,
    pad_id: int,
) -> float:
    """Add these pairs' part of the gradient of a batch, and return their part of its mean loss."""
    longest = _longest(pairs)
    lengths = [longest[row] for row in rows]
    total = 0.0
    for group in token_budget_batches(lengths, max_batch_tokens=max(max_batch_tokens // 2, 1)):
        part = [rows[place] for place in group]
        # Both responses of a pair run in one forward pass: chosen first, then rejected, each in the order of `part`.
        prompts = [pairs.prompt_ids[row] for row in part] * 2
        responses = [pairs.chosen_ids[row] for row in part] + [pairs.rejected_ids[row] for row in part]
        batch = collate(prompts, responses, range(len(prompts)), pad_id=pad_id, device=model.device)
        chosen, rejected = sequence_scores(model, batch, precision=precision).chunk(2)
        loss = pairwise_loss(chosen, rejected).sum() / batch_size
        loss.backward()
        total += float(loss.detach())
    return total


def scores(
    model: PreTrainedModel,
    pairs: Pairs,
    *,
    max_batch_tokens: int,
    precision: str,
    pad_id: int,
    processes: Processes,
    progress: Callable[[int], None],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the raw scores of the preferred and of the other responses, [B] float64 each, in every process."""
    rows = processes.share(_longest(pairs))
    prompts = [pairs.prompt_ids[row] for row in rows]

    def compute(batch: Batch) -> list[torch.Tensor]:
        return list(sequence_scores(model, batch, precision=precision))

    def of(responses: list[list[int]]) -> np.ndarray:
        options: dict[str, Any] = {
            "max_batch_tokens": max_batch_tokens,
            "pad_id": pad_id,
            "device": model.device,
            "progress": progress,
        }
        mine = for_all_rows(compute, prompts, [responses[row] for row in rows], **options)
        return np.array(processes.collected(len(responses), rows, [float(score) for score in mine]))

    return of(pairs.chosen_ids), of(pairs.rejected_ids)


def ranking(pairs: Pairs, chosen: np.ndarray, rejected: np.ndarray) -> dict[str, float]:
    """Return how scores rank pairs, names as in docs/metrics.md; empty for no pairs.

    Args:
        pairs: [B].
        chosen: [B], raw scores of the preferred responses.
        rejected: [B], raw scores of the others.
    """
    if not pairs.pair_ids:
        return {}
    return {
        **{f"eval/{name}": value for name, value in pair_statistics(chosen, rejected).items()},
        "eval/loss": float(np.mean(np.logaddexp(0.0, rejected - chosen))),
        "eval/calibration_error": calibration_error(chosen - rejected),
        "eval/length_baseline_accuracy": length_baseline(pairs),
        "eval/pairs": len(pairs.pair_ids),
    }


def calibration_error(margins: np.ndarray) -> float:
    """Return the expected calibration error of the preferences that margins imply.

        confidence_i = sigmoid(|margin_i|) in [0.5, 1];  right_i = margin_i > 0
        ECE = sum over 10 equal bins of (n_bin / n) * |mean right - mean confidence|

    Args:
        margins: [B], score(chosen) - score(rejected).

    Source: Guo et al. 2017, "On calibration of modern neural networks", eq. 3.
    """
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = (margins > 0).astype(float)
    bins = np.minimum((2 * (confidence - 0.5) * _CALIBRATION_BINS).astype(int), _CALIBRATION_BINS - 1)
    error = 0.0
    for index in range(_CALIBRATION_BINS):
        inside = bins == index
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return float(error)


def length_baseline(pairs: Pairs) -> float:
    """Return the accuracy of ranking by length alone, in whichever direction does better on these very pairs.

    A tie in length counts as half. Choosing the direction on the pairs themselves favours the baseline.
    """
    chosen = np.array([len(ids) for ids in pairs.chosen_ids])
    rejected = np.array([len(ids) for ids in pairs.rejected_ids])
    longer = float(np.mean((chosen > rejected) + 0.5 * (chosen == rejected)))
    return max(longer, 1 - longer)
