"""The PPO update: several epochs of clipped policy and value steps over the responses of an iteration.

Every loss of a minibatch is a plain sum over its tokens of weight_t * loss_t, with weights that depend on the whole
minibatch alone (ppo_loss.py), so neither losses nor gradients depend on how it was split. Models stay in eval mode:
dropout would make the ratio differ from 1 before the first step. Left out: files (stages/ppo_update.py).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from torch import Tensor

from rlhf_core.algorithms.statistics import explained_variance
from rlhf_core.errors import NumericError, RowMismatch
from rlhf_core.models.batching import Batch, collate, token_budget_batches
from rlhf_core.models.forward import critic_values, for_all_rows, token_outputs
from rlhf_core.training.distributed import Processes
from rlhf_core.training.learner import Learner
from rlhf_core.training.minibatches import minibatches
from rlhf_core.training.optimizer import clip_and_step
from rlhf_core.training.ppo_loss import Settings, Whole, micro_batch_loss
from rlhf_core.training.responses import Responses

logger = logging.getLogger("rlhf")

# A first ratio further from 1 than this means that scoring and training run different code paths, not rounding:
# float32 on CPU stays below 1e-4, bfloat16 products reach a few tenths on rare tokens.
_FIRST_RATIO_LIMIT = {"float32": 1e-3, "bf16-autocast": 0.5, "bfloat16": 0.5}


def update(
    learner: Learner,
    responses: Responses,
    settings: Settings,
    processes: Processes,
    progress: Callable[[dict[str, float]], None],
) -> list[dict[str, float]]:
    """Train policy and critic in place and return the metrics of every optimiser step.

        loss = sum_t weight_t * (policy_loss_t + kl_loss_coef * kl_t - entropy_coef * entropy_t)
               + value_coef * mean_s value_loss_s

    over the response tokens t of a minibatch and the states s that have a return.

    Args:
        learner: The policy and critic that scored the responses, and their optimiser, stepped once per minibatch.
        responses: With the logprobs, and the values where there is a critic, before the update.
        settings: Hyperparameters.
        processes: That share the rows of each minibatch; all take the same steps and return the same metrics.
        progress: Told the metrics after each step.

    Returns:
        One dict per optimiser step, names as in docs/metrics.md. Fewer than step_count where target_kl ended it.

    Raises:
        NumericError: If a loss or gradient is not finite, in which case that step is not taken, or if target_kl is
            exceeded before the first step.
        RowMismatch: If there is no response with tokens.
    """
    if not responses.sample_ids:
        raise RowMismatch("expected responses to train on, found none with at least one token")
    log: list[dict[str, float]] = []
    order = minibatches(
        len(responses.sample_ids),
        epochs=settings.ppo_epochs,
        minibatch_size=settings.minibatch_size,
        seed=settings.seed,
    )
    groups = learner.clip_groups()
    for step, rows in enumerate(order):
        share = [rows[place] for place in processes.share(_lengths(responses, rows))]
        with processes.together():
            found = _accumulate(learner, responses, share, Whole.of(responses, rows), settings, step=step)
        metrics = _step_metrics(processes.gathered(found))
        if step == 0 and settings.old_logprobs == "trainer":
            _check_first_ratio(metrics["policy/ratio_error_max"], settings.precision)
        if "policy" in learner.parts and _too_far(metrics["policy/approxkl_k3_avg"], settings.target_kl, step):
            learner.optimizer.zero_grad(set_to_none=True)
            break
        metrics["lr"] = float(learner.optimizer.param_groups[0]["lr"])
        processes.add_gradients([parameter for group in groups.values() for parameter in group])
        metrics |= clip_and_step(
            learner.optimizer,
            learner.scheduler,
            groups,
            max_grad_norm=settings.max_grad_norm,
            where=_where(step, responses, rows),
        )
        log.append(metrics)
        progress(metrics)
    return log


def step_count(responses: Responses, settings: Settings) -> int:
    """Return the optimiser steps of an update that is not stopped early."""
    return settings.ppo_epochs * -(-len(responses.sample_ids) // settings.minibatch_size)


def _accumulate(
    learner: Learner, responses: Responses, rows: list[int], whole: Whole, settings: Settings, *, step: int
) -> tuple[dict[str, float], float]:
    """Add the gradient of some rows of a minibatch, micro-batch by micro-batch.

    Returns:
        The rows' share of each metric, and the largest |ratio - 1| among them.
    """
    device = learner.policy.device
    lengths = _lengths(responses, rows)
    sums: dict[str, float] = defaultdict(float)
    ratio_error = 0.0
    for group in token_budget_batches(lengths, max_batch_tokens=settings.max_batch_tokens):
        part = [rows[place] for place in group]
        batch = collate(responses.prompt_ids, responses.response_ids, part, pad_id=settings.pad_id, device=device)
        outputs = token_outputs(
            learner.policy,
            batch,
            temperature=settings.temperature,
            logits_chunk_tokens=settings.logits_chunk_tokens,
            precision=settings.precision,
            critic=learner.critic,
        )
        loss, found, error = micro_batch_loss(outputs, responses, batch, whole, settings)
        if not math.isfinite(float(loss.detach())):
            raise NumericError(
                f"{_where(step, responses, part)}: the loss is {float(loss.detach())}; the step was not taken"
            )
        loss.backward()
        for name, share in found.items():
            sums[name] += share
        ratio_error = max(ratio_error, error)
    return sums, ratio_error


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


def _too_far(approxkl: float, target_kl: float | None, step: int) -> bool:
    """Whether the policy has moved further than target_kl."""
    if target_kl is None or approxkl <= target_kl:
        return False
    if step == 0:
        raise NumericError(
            f"before any step, approxkl_k3 is {approxkl:.4g} nats a token, above ppo_update.target_kl = {target_kl}:"
            " the logprobs that the ratio starts from are too far from this policy to take a single step; raise it"
        )
    logger.info("stopped before step %d: approxkl_k3 is %.4g, target_kl %g", step + 1, approxkl, target_kl)
    return True


def _where(step: int, responses: Responses, rows: list[int]) -> str:
    names = ", ".join(responses.sample_ids[row] for row in rows[:4])
    return f"optimiser step {step + 1}, rows {names}{', ...' if len(rows) > 4 else ''}"


def summary(log: list[dict[str, float]], *, steps: int) -> dict[str, float]:
    """Return the update's metrics: means over its optimiser steps (as TRL), and the first step's ratio error.

    Args:
        log: From update.
        steps: From step_count.
    """
    averaged = {name: float(np.mean([row[name] for row in log])) for name in log[0]}
    first_error = log[0]["policy/ratio_error_max"]
    for name in ("policy/ratio_error_max", "val/squared_error"):
        averaged.pop(name, None)
    for name in ("grad_norm", "critic_grad_norm"):
        if name in averaged:
            averaged[f"{name}_avg"] = averaged.pop(name)
    averaged["lr"] = log[-1]["lr"]
    return averaged | {
        "policy/max_first_ratio_error": first_error,
        "optimizer_steps": len(log),
        "update/stopped_early": int(len(log) < steps),
    }


def explained_variance_after(learner: Learner, responses: Responses, settings: Settings, processes: Processes) -> float:
    """Return the explained variance of the returns by the updated critic, on the responses it was trained on."""
    policy, critic = learner.policy, learner.critic
    assert critic is not None and responses.returns is not None
    count = len(responses.sample_ids)
    rows = processes.share(_lengths(responses, list(range(count))))

    def compute(batch: Batch) -> list[Tensor]:
        if critic.backbone is not None:
            values, _ = critic_values(critic, batch, None, precision=settings.precision)
            return list(values.split(batch.lengths))
        outputs = token_outputs(
            policy,
            batch,
            temperature=settings.temperature,
            logits_chunk_tokens=settings.logits_chunk_tokens,
            precision=settings.precision,
            critic=critic,
        )
        assert outputs.values is not None
        return list(outputs.values.split(batch.lengths))

    values = for_all_rows(
        compute,
        [responses.prompt_ids[row] for row in rows],
        [responses.response_ids[row] for row in rows],
        max_batch_tokens=settings.max_batch_tokens,
        pad_id=settings.pad_id,
        device=policy.device,
        progress=lambda rows: None,
    )
    all_values = processes.collected(count, rows, [row.numpy() for row in values])
    return explained_variance(np.concatenate(all_values), np.concatenate(responses.returns))
