"""The PPO update: several epochs of clipped policy and value steps over the responses of an iteration.

Every loss of a minibatch is a plain sum over its tokens of weight_t * loss_t, with weights that depend on the whole
minibatch alone (ppo_loss.py), so neither losses nor gradients depend on how it was split. Models stay in eval mode:
dropout would make the ratio differ from 1 before the first step. Left out: files (stages/ppo_update.py), and what is
measured afterwards (ppo_measures.py).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rlhf_core.errors import NonFiniteStep, NumericError, RowMismatch
from rlhf_core.models.batching import Batch, collate
from rlhf_core.models.forward import TokenOutputs, cut_rows, token_outputs, without_pads
from rlhf_core.models.memory import TokenBudget
from rlhf_core.training.distributed import Processes
from rlhf_core.training.learner import Learner
from rlhf_core.training.minibatches import minibatches
from rlhf_core.training.optimizer import clip_and_step, count_skipped, put_training_state, training_state
from rlhf_core.training.ppo_loss import Settings, Whole, likely_cause, micro_batch_loss
from rlhf_core.training.responses import Responses
from rlhf_core.training.saves import Saves

logger = logging.getLogger("rlhf")

# A first ratio further from 1 than this means that scoring and training run different code paths, not rounding:
# float32 on CPU stays below 1e-4, bfloat16 products reach a few tenths on rare tokens.
_FIRST_RATIO_LIMIT = {"float32": 1e-3, "bf16-autocast": 0.5, "bfloat16": 0.5}


@dataclass
class Progress:
    """How far an update has come."""

    done: int  # minibatches gone through, refused ones included
    skipped: int  # of them refused: their loss or gradient was not finite
    log: list[dict[str, float]]  # of every optimiser step taken, names as in docs/metrics.md
    stopped: bool = False  # whether target_kl ended it


def update(
    learner: Learner,
    responses: Responses,
    settings: Settings,
    processes: Processes,
    show: Callable[[dict[str, float]], None],
    saves: Saves | None,
) -> Progress:
    """Train policy and critic in place and return the metrics of every optimiser step.

        loss = sum_t weight_t * (policy_loss_t + kl_loss_coef * kl_t - entropy_coef * entropy_t)
               + value_coef * mean_s value_loss_s

    over the response tokens t of a minibatch and the states s that have a return.

    Args:
        learner: The policy and critic that scored the responses, and their optimiser, stepped once per minibatch.
        responses: With the logprobs, and the values where there is a critic, before the update.
        settings: Hyperparameters.
        processes: That share the rows of each minibatch; all take the same steps and return the same metrics.
        show: Told the metrics after each step, those of an earlier run that was killed first.
        saves: Where the update goes on from, and keeps its state; None = nowhere.

    Raises:
        NonFiniteStep: If a loss or gradient is not finite more often than max_skipped_steps. That step is not taken.
        NumericError: If target_kl is exceeded before the first step, or no step was taken.
        RowMismatch: If there is no response with tokens.
    """
    if not responses.sample_ids:
        raise RowMismatch("expected responses to train on, found none with at least one token")
    progress = _resumed(learner, saves)
    for metrics in progress.log:
        show(metrics)
    budget = TokenBudget(settings.max_batch_tokens)
    for step, rows in enumerate(_order(responses, settings)):
        if step < progress.done:
            continue
        try:
            taken = _step(learner, responses, rows, settings, processes, budget, step=step, first=not progress.log)
        except NonFiniteStep as error:
            learner.optimizer.zero_grad(set_to_none=True)
            key, most = "ppo_update.max_skipped_steps", settings.max_skipped_steps
            progress.skipped = count_skipped(error, progress.skipped, most=most, key=key)
        else:
            if taken is None:
                progress.stopped = True
                break
            progress.log.append(taken)
            show(taken)
        progress.done = step + 1
        if saves is not None and saves.due(progress.done):
            _save(learner, progress, saves)
    if not progress.log:
        raise NumericError(
            f"iteration {settings.iteration}: no optimiser step was taken; {progress.skipped} were refused, because"
            " their loss or gradient was not finite (the warnings above say where)"
        )
    return progress


def _order(responses: Responses, settings: Settings) -> Iterator[list[int]]:
    """The rows of each minibatch."""
    return minibatches(
        len(responses.sample_ids),
        epochs=settings.ppo_epochs,
        minibatch_size=settings.minibatch_size,
        seed=settings.seed,
    )


def _resumed(learner: Learner, saves: Saves | None) -> Progress:
    """Put the learner where a killed run was, and return how far that is."""
    found = None if saves is None else saves.newest()
    if found is None:
        return Progress(done=0, skipped=0, log=[])
    tensors, facts = found
    put_training_state(
        learner.optimizer, learner.scheduler, learner.trained(), tensors, schedule_step=facts["schedule_step"]
    )
    logger.info("going on after minibatch %d, where an earlier run was ended", facts["done"])
    return Progress(done=facts["done"], skipped=facts["skipped"], log=[dict(pairs) for pairs in facts["log"]])


def _save(learner: Learner, progress: Progress, saves: Saves) -> None:
    """Keep all that the rest of the update depends on: it draws no random numbers, and its order is a function of the
    seed.
    """
    facts = {
        "done": progress.done,
        "skipped": progress.skipped,
        "log": [list(metrics.items()) for metrics in progress.log],  # pairs: JSON's maps are sorted, columns are not
        "schedule_step": learner.scheduler.last_epoch,
    }
    saves.write(progress.done, training_state(learner.optimizer, learner.trained()), facts)


def _step(
    learner: Learner,
    responses: Responses,
    rows: list[int],
    settings: Settings,
    processes: Processes,
    budget: TokenBudget,
    *,
    step: int,
    first: bool,
) -> dict[str, float] | None:
    """Take one optimiser step and return its metrics; None where the policy is too far already to take it.

    Args:
        learner, responses, settings, processes: As for update.
        rows: Of the minibatch.
        budget: Of a forward pass.
        step: From 0; for messages.
        first: Whether no step was taken yet.

    Raises:
        NonFiniteStep: If the loss or gradient is not finite.
    """
    share = [rows[place] for place in processes.share(_lengths(responses, rows))]
    # Within an outer autocast, even one that is off, weights are rounded once for all micro-batches.
    with processes.together(), torch.autocast(learner.policy.device.type, enabled=False):
        found = _accumulate(learner, responses, share, Whole.of(responses, rows), settings, budget, step=step)
    metrics = _step_metrics(processes.gathered(found))
    if first and settings.old_logprobs == "trainer":
        _check_first_ratio(metrics["policy/ratio_error_max"], settings.precision)
    if "policy" in learner.parts and _too_far(metrics["policy/approxkl_k3_avg"], settings, step, first=first):
        learner.optimizer.zero_grad(set_to_none=True)
        return None
    metrics["lr"] = float(learner.optimizer.param_groups[0]["lr"])
    groups = learner.clip_groups()
    processes.add_gradients([parameter for group in groups.values() for parameter in group])
    return metrics | clip_and_step(
        learner.optimizer,
        learner.scheduler,
        groups,
        max_grad_norm=settings.max_grad_norm,
        where=_where(settings, step, responses, rows),
    )


def step_count(responses: Responses, settings: Settings) -> int:
    """Return the optimiser steps of an update that is not stopped early."""
    return settings.ppo_epochs * -(-len(responses.sample_ids) // settings.minibatch_size)


def _accumulate(
    learner: Learner,
    responses: Responses,
    rows: list[int],
    whole: Whole,
    settings: Settings,
    budget: TokenBudget,
    *,
    step: int,
) -> tuple[dict[str, float], float]:
    """Add the gradient of some rows of a minibatch, micro-batch by micro-batch.

    Returns:
        The rows' share of each metric, and the largest |ratio - 1| among them.
    """
    found: list[tuple[dict[str, float], float]] = []
    batches = _micro_batches(learner, responses, rows, budget)
    while len(found) < len(batches):
        part = batches[len(found)]

        def work(part: list[int] = part) -> None:
            found.append(_micro_batch(learner, responses, part, whole, settings, step=step))

        if not budget.fits(work, _lengths(responses, part)):
            # A part of the micro-batch's gradient may have been added before memory ran out, so all is done again.
            learner.optimizer.zero_grad(set_to_none=True)
            found.clear()
            batches = _micro_batches(learner, responses, rows, budget)
    sums: dict[str, float] = defaultdict(float)
    for shares, _ in found:
        for name, share in shares.items():
            sums[name] += share
    return sums, max((error for _, error in found), default=0.0)


def _micro_batches(learner: Learner, responses: Responses, rows: list[int], budget: TokenBudget) -> list[list[int]]:
    """Return which rows of a minibatch run together."""
    return cut_rows(
        responses.prompt_ids,
        responses.response_ids,
        rows,
        max_batch_tokens=budget.tokens,
        packed=without_pads(*learner.models()),
        device=learner.policy.device,
    )


def _micro_batch(
    learner: Learner, responses: Responses, rows: list[int], whole: Whole, settings: Settings, *, step: int
) -> tuple[dict[str, float], float]:
    """Add the gradient of one micro-batch, and return its share of each metric and its largest |ratio - 1|."""
    device = learner.policy.device
    batch = collate(responses.prompt_ids, responses.response_ids, rows, pad_id=settings.pad_id, device=device)
    outputs = outputs_of(learner, batch, settings)
    loss, found, error = micro_batch_loss(outputs, responses, batch, whole, settings)
    if not math.isfinite(float(loss.detach())):
        raise NonFiniteStep(
            f"{_where(settings, step, responses, rows)}: the loss is {float(loss.detach())}; the step was not taken."
            f" Likely cause: {likely_cause(outputs, responses, rows)}"
        )
    loss.backward()
    return found, error


def outputs_of(learner: Learner, batch: Batch, settings: Settings) -> TokenOutputs:
    """Return what policy and critic say of a batch's response tokens, as the update computes it."""
    return token_outputs(
        learner.policy,
        batch,
        temperature=settings.temperature,
        logits_chunk_tokens=settings.logits_chunk_tokens,
        precision=settings.precision,
        critic=learner.critic,
    )


def _lengths(responses: Responses, rows: list[int]) -> list[int]:
    """Tokens of these rows, prompts included."""
    return [len(responses.prompt_ids[row]) + len(responses.response_ids[row]) for row in rows]


def _step_metrics(parts: list[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Return a whole minibatch's metrics from what _accumulate found in its parts, some of which may have no rows."""
    sums: dict[str, float] = defaultdict(float)
    for part, _ in parts:
        for name, share in part.items():
            sums[name] += share
    ratio_error = max(error for _, error in parts)
    mean_square = sums["ratio_squared"]
    kept = {name: value for name, value in sums.items() if name != "ratio_squared"}
    variance = max(mean_square - sums["val/ratio"] ** 2, 0.0)
    return kept | {"val/ratio_var": variance, "policy/ratio_error_max": ratio_error}


def _check_first_ratio(error: float, precision: str) -> None:
    limit = _FIRST_RATIO_LIMIT[precision]
    if error > limit:
        logger.warning(
            "before any step, a ratio is already off 1 by %.3g (expected below %g for %s): logprobs of data/scores were"
            " not made by this policy in this precision",
            error,
            limit,
            precision,
        )


def _too_far(approxkl: float, settings: Settings, step: int, *, first: bool) -> bool:
    """Whether the policy has moved further than target_kl."""
    if settings.target_kl is None or approxkl <= settings.target_kl:
        return False
    if first:
        raise NumericError(
            f"before any step, approxkl_k3 is {approxkl:.4g} nats a token, above ppo_update.target_kl ="
            f" {settings.target_kl}: the logprobs that the ratio starts from are too far from this policy to take a"
            " single step; raise it"
        )
    logger.info("stopped before step %d: approxkl_k3 is %.4g, target_kl %g", step + 1, approxkl, settings.target_kl)
    return True


def _where(settings: Settings, step: int, responses: Responses, rows: list[int]) -> str:
    names = ", ".join(responses.sample_ids[row] for row in rows[:4])
    return f"iteration {settings.iteration}, optimiser step {step + 1}, rows {names}{', ...' if len(rows) > 4 else ''}"
