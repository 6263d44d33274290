"""Reward model training on ranked responses, by pairs or by whole lists, and the scores that it is measured by.

Left out: files (stages/train_rm.py), what a list is (comparisons.py), measures (ranking.py).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.algorithms.losses import centring_loss, listwise_loss, pairwise_loss
from rlhf_core.errors import ConfigError, NonFiniteStep
from rlhf_core.models.batching import Batch, collate, token_budget_batches
from rlhf_core.models.forward import for_all_rows, sequence_scores, without_pads
from rlhf_core.models.memory import TokenBudget
from rlhf_core.training.comparisons import Ranked
from rlhf_core.training.distributed import Processes
from rlhf_core.training.minibatches import minibatches
from rlhf_core.training.optimizer import (
    NamedParameters,
    adamw,
    clip_and_step,
    count_skipped,
    put_training_state,
    schedule,
    trainable,
    training_state,
)
from rlhf_core.training.ranking import held_out_loss
from rlhf_core.training.saves import Saves

logger = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Objective:
    """The loss of one list of responses, best first."""

    loss: str  # pairs (lists of two) | plackett_luce
    margin_coef: float  # reward units per unit of the data's margin
    label_smoothing: float  # probability that a label is the wrong way round
    soft_labels: bool  # whether the target is the annotators' agreement, where the data has it
    centring_coef: float  # weight of the squared score sum


@dataclass(frozen=True)
class Execution:
    """How the model is run. The gradient does not depend on it beyond rounding."""

    max_batch_tokens: int  # tokens of one forward pass, pads included
    precision: str  # compute.precision
    pad_id: int
    processes: Processes  # that share the lists of each batch


@dataclass(frozen=True)
class Trained:
    """What training ended with."""

    loss: float  # mean over the steps of the epoch that was kept
    best_epoch: int  # that epoch, from 1
    parameters: int  # numbers that were trained
    skipped: int  # steps refused: their loss or gradient was not finite


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
    # An encoder's positions and layer norm lie in `embeddings` too, below its layers.
    embeddings: Any = getattr(model.base_model, "embeddings", model.get_input_embeddings())
    for module in (embeddings, *stack[:layers]):
        module.requires_grad_(False)


def train(
    model: PreTrainedModel,
    rows: Sequence[Ranked],
    held_out: Sequence[Ranked],
    objective: Objective,
    execution: Execution,
    *,
    learning_rate: float,
    weight_decay: float,
    warmup_fraction: float,
    epochs: int,
    batch_size: int,
    max_grad_norm: float,
    adam_betas: Sequence[float],
    adam_eps: float,
    max_skipped_steps: int,
    seed: int,
    progress: Callable[[float], None],
    saves: Saves | None,
) -> Trained:
    """Train a sequence classifier in place and leave it as it was after its best epoch.

        loss = mean over the batch's lists of what list_losses says

    The best epoch is that of the lowest loss on held-out pairs, the earlier one of two equal. Without held-out pairs,
    or with one epoch, it is the last. The gradient is that of the whole batch, however it is split by the token budget
    and over processes. Dropout stays off.

    Args:
        model: One label; frozen parameters stay as they are.
        rows: At least one list, as comparisons.all_pairs or whole_lists made them.
        held_out: Ranked lists to choose the epoch by; none = keep the last.
        objective: The loss.
        execution: How it is run.
        learning_rate: AdamW; linear warm-up, then linear decay to 0.
        weight_decay: AdamW.
        warmup_fraction: Of all steps.
        epochs: Passes over the lists.
        batch_size: Lists per optimiser step.
        max_grad_norm: Global 2-norm.
        adam_betas: Decay of the first and second moments.
        adam_eps: Added to the root of the second moment.
        max_skipped_steps: How many steps may be left out because a loss or gradient is not finite.
        seed: Of the order of the lists.
        progress: Told the loss after each step, and first those of an earlier run that was killed.
        saves: Where training goes on from, and keeps its state; None = nowhere.

    Raises:
        NonFiniteStep: If a loss or gradient is not finite more often than that, or throughout the epoch that is kept.
    """
    named = trainable(model, "reward_model")
    optimizer = adamw([(named, learning_rate)], betas=adam_betas, eps=adam_eps, weight_decay=weight_decay, kind="adamw")
    batches = list(minibatches(len(rows), epochs=epochs, minibatch_size=batch_size, seed=seed))
    warmup = math.ceil(warmup_fraction * len(batches))
    scheduler = schedule(optimizer, name="linear", warmup_steps=warmup, total_steps=len(batches) + 1, first_step=0)
    parameters = [parameter for _, parameter in named]
    per_epoch = len(batches) // epochs
    best = _Best(model, parameters, held_out if epochs > 1 else [], execution)
    losses = _resumed(optimizer, scheduler, named, best, saves)
    for loss in losses:
        progress(loss if loss is not None else math.nan)
    for step, batch in enumerate(batches[len(losses) :], start=len(losses)):
        try:
            loss, where = _batch_gradient(model, rows, batch, objective, execution, step=step)
            execution.processes.add_gradients(parameters)
            clip_and_step(optimizer, scheduler, {"grad_norm": parameters}, max_grad_norm=max_grad_norm, where=where)
        except NonFiniteStep as error:
            optimizer.zero_grad(set_to_none=True)
            count_skipped(error, losses.count(None), most=max_skipped_steps, key="train_rm.max_skipped_steps")
            loss = None
        losses.append(loss)
        progress(loss if loss is not None else math.nan)
        if (step + 1) % per_epoch == 0:
            best.offer((step + 1) // per_epoch)
        if saves is not None and saves.due(step + 1):
            _save(optimizer, scheduler, named, best, losses, saves)
    return _trained(best.restore(), losses, per_epoch, size=sum(parameter.numel() for parameter in parameters))


def _trained(epoch: int, losses: Sequence[float | None], per_epoch: int, *, size: int) -> Trained:
    """Return what training ended with, given the epoch that is kept."""
    taken = [loss for loss in losses[(epoch - 1) * per_epoch : epoch * per_epoch] if loss is not None]
    skipped = losses.count(None)
    if not taken:
        raise NonFiniteStep(f"train_rm: no step of epoch {epoch} was taken; {skipped} were refused in all")
    return Trained(float(np.mean(taken)), epoch, size, skipped)


def _resumed(
    optimizer: torch.optim.Optimizer, scheduler: Any, named: NamedParameters, best: "_Best", saves: Saves | None
) -> list[float | None]:
    """Put everything where a killed run was, and return the losses of its steps, None for one that was refused."""
    found = None if saves is None else saves.newest()
    if found is None:
        return []
    tensors, facts = found
    put_training_state(optimizer, scheduler, named, tensors, schedule_step=facts["schedule_step"])
    best.put(tensors, facts["best"])
    losses: list[float | None] = facts["losses"]
    logger.info("going on after step %d, where an earlier run was ended", len(losses))
    return losses


def _save(
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    named: NamedParameters,
    best: "_Best",
    losses: list[float | None],
    saves: Saves,
) -> None:
    """Keep all that the rest of the training depends on; the order of the lists is a function of the seed."""
    kept, described = best.state()
    facts = {"losses": losses, "best": described, "schedule_step": scheduler.last_epoch}
    saves.write(len(losses), training_state(optimizer, named) | kept, facts)


class _Best:
    """The trained parameters after the best epoch so far: on the CPU, in every process."""

    def __init__(
        self,
        model: PreTrainedModel,
        parameters: Sequence[nn.Parameter],
        held_out: Sequence[Ranked],
        execution: Execution,
    ) -> None:
        self._model, self._parameters, self._held_out, self._execution = model, parameters, held_out, execution
        self._loss, self._epoch = math.inf, 0
        self._kept: list[Tensor] | None = None

    def offer(self, epoch: int) -> None:
        """Measure the model as it is after an epoch. Every process sees the same scores, and so decides alike."""
        if not self._held_out:
            self._epoch = epoch
            return
        found = scores(self._model, self._held_out, self._execution, progress=lambda rows: None)
        loss = held_out_loss(self._held_out, found)
        if self._execution.processes.is_main:
            logger.info("epoch %d: loss on held-out pairs %.4f", epoch, loss)
        if loss < self._loss:
            self._loss, self._epoch = loss, epoch
            self._kept = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what put takes: the parameters that are kept, if any, and what is known of them."""
        kept = {f"best/{place}": tensor for place, tensor in enumerate(self._kept or [])}
        return kept, {"loss": self._loss if self._kept is not None else None, "epoch": self._epoch}

    def put(self, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
        """Go on from what state returned."""
        self._epoch = described["epoch"]
        if described["loss"] is not None:
            self._loss = described["loss"]
            self._kept = [tensors[f"best/{place}"].clone() for place in range(len(self._parameters))]

    def restore(self) -> int:
        """Put the best parameters back and return their epoch."""
        if self._kept is not None:
            with torch.no_grad():
                for parameter, kept in zip(self._parameters, self._kept, strict=True):
                    parameter.copy_(kept)
        return self._epoch


def _batch_gradient(
    model: PreTrainedModel,
    rows: Sequence[Ranked],
    batch: list[int],
    objective: Objective,
    execution: Execution,
    *,
    step: int,
) -> tuple[float, str]:
    """Leave this process's part of a batch's gradient in the parameters; return the batch's loss, and where it is."""
    processes = execution.processes
    share = [batch[place] for place in processes.share([rows[row].longest() for row in batch])]
    with processes.together():
        total = accumulate(model, [rows[row] for row in share], objective, execution, batch_size=len(batch))
        if not math.isfinite(total):
            raise NonFiniteStep(
                f"{_where(step, rows, share)}: the loss is {total}; the step was not taken. Likely causes: weights that"
                " diverged (lower train_rm.learning_rate), or an extreme margin in the data"
            )
    return sum(processes.gathered(total)), _where(step, rows, batch)


def _where(step: int, rows: Sequence[Ranked], batch: list[int]) -> str:
    return f"train_rm, optimiser step {step + 1}, pairs {', '.join(rows[row].pair_id for row in batch[:4])}, ..."


def accumulate(
    model: PreTrainedModel, rows: Sequence[Ranked], objective: Objective, execution: Execution, *, batch_size: int
) -> float:
    """Add the part that some lists have in the gradient of a batch, and return their part of its mean loss.

    All responses of a list run in one forward pass.

    Args:
        model: Its gradients grow.
        rows: Lists of this process.
        objective: The loss.
        execution: How it is run.
        batch_size: Lists of the whole batch, over all processes.
    """
    most = max((len(row.ranks) for row in rows), default=1)
    total = 0.0
    lengths = [row.longest() for row in rows]
    for group in token_budget_batches(lengths, max_batch_tokens=max(execution.max_batch_tokens // most, 1)):
        part = [rows[place] for place in group]
        prompts = [ids for row in part for ids in row.prompt_ids]
        responses = [ids for row in part for ids in row.response_ids]
        # All best responses first, then all second best, and so on; found is list after list again.
        places = [place for row in part for place in range(len(row.ranks))]
        order = sorted(range(len(prompts)), key=lambda flat: places[flat])
        batch = collate(prompts, responses, order, pad_id=execution.pad_id, device=model.device)
        by_place = sequence_scores(model, batch, precision=execution.precision)
        found = by_place[torch.tensor(order, device=by_place.device).argsort()]
        loss = list_losses(found, part, objective).sum() / batch_size
        loss.backward()
        total += float(loss.detach())
    return total


def list_losses(found: Tensor, rows: Sequence[Ranked], objective: Objective) -> Tensor:
    """Return the loss of each list.

        pairs:         pairwise_loss with margin = margin_coef * the data's margin, and with
                       target = p (1 - label_smoothing) + (1 - p) label_smoothing, p = 1, or with soft_labels the
                       agreement; of a tied pair, margin 0 and target 0.5
        plackett_luce: listwise_loss
        both:          + centring_coef * centring_loss

    Args:
        found: [N], raw scores, list after list; carries the gradient.
        rows: The lists; of two responses each with the loss pairs.
        objective: The loss.

    Returns:
        [lists].
    """
    if objective.loss == "pairs":
        chosen, rejected = found.view(-1, 2).unbind(-1)
        tied = [row.ranks[0] == row.ranks[1] for row in rows]
        margins = [0.0 if tie else objective.margin_coef * row.margin for row, tie in zip(rows, tied, strict=True)]
        targets = [0.5 if tie else _target(row, objective) for row, tie in zip(rows, tied, strict=True)]
        losses = pairwise_loss(chosen, rejected, margins=found.new_tensor(margins), targets=found.new_tensor(targets))
    else:
        losses = listwise_loss(found, [row.ranks for row in rows])
    if objective.centring_coef:
        losses = losses + objective.centring_coef * centring_loss(found, [len(row.ranks) for row in rows])
    return losses


def _target(row: Ranked, objective: Objective) -> float:
    """The probability that the better one of two responses is better."""
    sure = 1.0 if row.agreement is None or not objective.soft_labels else row.agreement
    return sure * (1 - objective.label_smoothing) + (1 - sure) * objective.label_smoothing


def scores(
    model: PreTrainedModel, rows: Sequence[Ranked], execution: Execution, *, progress: Callable[[int], None]
) -> list[np.ndarray]:
    """Return the raw scores of every list's responses, [K] float64 each, in every process.

    Args:
        model: One label.
        rows: Ranked lists.
        execution: How it is run.
        progress: Told the number of this process's responses done after each batch.
    """
    mine = execution.processes.share([row.longest() for row in rows])
    found: dict[int, list[float]] = {row: [] for row in mine}

    def compute(batch: Batch) -> list[Tensor]:
        return list(sequence_scores(model, batch, precision=execution.precision))

    for place in range(max((len(row.ranks) for row in rows), default=0)):
        having = [row for row in mine if place < len(rows[row].ranks)]
        results = for_all_rows(
            compute,
            [rows[row].prompt_ids[place] for row in having],
            [rows[row].response_ids[place] for row in having],
            packed=without_pads(model),
            budget=TokenBudget(execution.max_batch_tokens),
            pad_id=execution.pad_id,
            device=model.device,
            progress=progress,
        )
        for row, score in zip(having, results, strict=True):
            found[row].append(float(score))
    return [np.array(own) for own in execution.processes.collected(len(rows), mine, [found[row] for row in mine])]
