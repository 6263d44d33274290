"""The PPO update: its loop beside bare forward and backward passes of the same model, in tokens per second and memory.

    python -m benchmarks.ppo_update            # the model of the demo, some minutes

bare: a policy with a value head over batches sorted by length, whole logits at the response tokens, float32 there as in
the loop, logprobs and values summed up, backward. No entropy, no loss, no optimiser.
loop: one epoch of training/ppo.py over the same rows in minibatches, optimiser steps included.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks import cases, measure
from rlhf_core.models.batching import Batch, collate, token_budget_batches
from rlhf_core.models.checkpoint import OptimizerState, new_value_head
from rlhf_core.models.checkpointing import checkpoint_layers
from rlhf_core.models.critic import Critic
from rlhf_core.models.forward import autocast, cut_rows, for_all_rows, without_pads
from rlhf_core.models.loading import load_causal_lm, torch_device
from rlhf_core.models.memory import TokenBudget, keep_freed_memory
from rlhf_core.models.packing import layout, without_repetition
from rlhf_core.training.distributed import ALONE
from rlhf_core.training.learner import Learner, new_learner
from rlhf_core.training.minibatches import minibatches
from rlhf_core.training.ppo import outputs_of, update
from rlhf_core.training.ppo_loss import Settings
from rlhf_core.training.responses import Responses

MODULE = "benchmarks.ppo_update"
NEW = OptimizerState(steps={}, episode=0, first_moments={}, second_moments={})
MINIBATCH, SEED, TEMPERATURE = 16, 1, 0.7


def main() -> None:
    """Measure, print the table, write the result; or run one contender."""
    arguments = cases.parsed(MODULE, __doc__, responses=64)
    if arguments.only:
        keep_freed_memory()
        run = {"loop": timed_loop, "bare": timed_bare}[arguments.only]
        seconds, tokens, computed = run(arguments)
        cases.note(arguments, seconds=seconds, tokens=tokens, computed=computed)
        return
    found = cases.take_turns(MODULE, ["bare", "loop"], arguments)
    result = cases.compared(found, "bare")
    computed = {name: rounds[0]["computed"] for name, rounds in found.items()}
    print(cases.comparison_table(f"ppo_update: {arguments.responses} responses, {arguments.precision}", result))
    for name, shares in computed.items():
        print(
            f"\ncomputed by {name}: "
            + ", ".join(f"{share:.3f} of all tokens in {where}" for where, share in shares.items())
        )
    print(f"\n{measure.written('ppo_update', {'contenders': result, 'computed': computed}, arguments.json)}")


def timed_loop(arguments: argparse.Namespace) -> tuple[float, int, dict[str, float]]:
    """Return seconds, tokens, and what is computed in one epoch."""
    learner, rows, settings = prepared(arguments)
    checkpoint_layers(learner.policy, "selective", arguments.precision)  # as params.yaml has it
    responses = scored(learner, rows, settings)
    few = list(range(min(2, len(rows.lengths))))
    update(learner, chosen(responses, few), settings, ALONE, lambda metrics: None, None)  # first calls are slow
    started = time.perf_counter()
    update(learner, responses, settings, ALONE, lambda metrics: None, None)
    return time.perf_counter() - started, sum(rows.lengths), computed_of(learner, rows, settings)


def computed_of(learner: Learner, rows: cases.Rows, settings: Settings) -> dict[str, float]:
    """Return what is computed in an epoch, of its tokens' number: by attention, and by everything else.

    Above 1 for pads, below 1 for beginnings that rows have in common and that are computed once.
    """
    packed, device = without_pads(*learner.models()), learner.policy.device
    attention = everything_else = 0
    for minibatch in minibatches(len(rows.lengths), epochs=1, minibatch_size=MINIBATCH, seed=settings.seed):
        for part in cut_rows(
            rows.prompts,
            rows.responses,
            minibatch,
            max_batch_tokens=settings.max_batch_tokens,
            packed=packed,
            device=device,
        ):
            ids, _, tokens = without_repetition([rows.prompts[row] + rows.responses[row] for row in part])
            padded = len(part) * max(rows.lengths[row] for row in part)
            attention += len(layout(tokens, count=len(ids), device=device).tokens) if packed else padded
            everything_else += len(ids) if packed else padded
    total = sum(rows.lengths)
    return {"attention": attention / total, "everything else": everything_else / total}


def timed_bare(arguments: argparse.Namespace) -> tuple[float, int, dict[str, float]]:
    """Return seconds, tokens, and what is computed in bare passes."""
    learner, rows, settings = prepared(arguments)
    groups = token_budget_batches(rows.lengths, max_batch_tokens=settings.max_batch_tokens)
    device = learner.policy.device
    batches = [collate(rows.prompts, rows.responses, group, pad_id=0, device=device) for group in groups]
    bare(learner, batches[-1], settings.precision)
    started = time.perf_counter()
    for batch in batches:
        bare(learner, batch, settings.precision)
    seconds = time.perf_counter() - started
    share = sum(batch.input_ids.numel() for batch in batches) / sum(rows.lengths)
    return seconds, sum(rows.lengths), {"attention": share, "everything else": share}


def bare(learner: Learner, batch: Batch, precision: str) -> None:
    """Add the gradient of the sum of all logprobs and values."""
    model, critic = learner.policy, learner.critic
    assert critic is not None
    with autocast(batch.input_ids.device, precision):
        hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    states = hidden.flatten(0, 1).index_select(0, batch.predictors)
    weight: Any = model.get_output_embeddings().weight
    logits = nn.functional.linear(states.to(weight.dtype), weight).float() / TEMPERATURE
    logprobs = torch.log_softmax(logits, -1).gather(-1, batch.targets[:, None])
    (logprobs.sum() + critic.values(states).sum()).backward()


def prepared(arguments: argparse.Namespace) -> tuple[Learner, cases.Rows, Settings]:
    """Return a learner, rows, and settings."""
    directory = cases.model_directory(arguments.model)
    policy = load_causal_lm(directory, device=torch_device("auto"), precision=arguments.precision)
    rows = cases.made_up_rows(arguments, policy.config.vocab_size)
    return learner_of(policy), rows, settings_of(arguments)


def learner_of(policy: PreTrainedModel) -> Learner:
    """Return a policy with a shared critic and an optimiser, as the first iteration has them."""
    critic = Critic(new_value_head(policy.config.hidden_size).to(policy.device))
    return new_learner(
        policy, critic, NEW, critic_only=False, optimizer="adamw", learning_rate=1e-6, value_head_learning_rate=1e-6,
        critic_learning_rate=1e-6, adam_betas=(0.9, 0.999), adam_eps=1e-8, weight_decay=0.0, lr_schedule="constant",
        warmup_steps=0, schedule_steps=1,
    )  # fmt: skip


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return common settings of one epoch, on which speed does not depend."""
    return Settings(
        iteration="1", temperature=TEMPERATURE, ppo_epochs=1, minibatch_size=MINIBATCH, old_logprobs="trainer",
        ratio="token", clip_range=0.2, clip_range_high=0.2, dual_clip=None, value_clip_range=0.3, value_loss_factor=0.5,
        value_coef=0.1, entropy_coef=0.01, kl_loss_coef=0.0, kl_loss_estimator="k3", kl_estimate_bound=None,
        aggregation="token_mean", aggregation_constant=1.0, target_kl=None, max_kl=None, max_skipped_steps=0,
        max_grad_norm=1.0, max_batch_tokens=arguments.max_batch_tokens,
        logits_chunk_tokens=arguments.logits_chunk_tokens, precision=arguments.precision, pad_id=0, seed=SEED,
    )  # fmt: skip


def scored(learner: Learner, rows: cases.Rows, settings: Settings) -> Responses:
    """Return the rows with their logprobs and values before the update, and made-up advantages."""

    def compute(batch: Batch) -> list[Tensor]:
        outputs = outputs_of(learner, batch, settings)
        assert outputs.values is not None
        return list(torch.stack([outputs.logprobs, outputs.values]).split(batch.lengths, dim=1))

    found = for_all_rows(
        compute,
        rows.prompts,
        rows.responses,
        packed=without_pads(*learner.models()),
        budget=TokenBudget(settings.max_batch_tokens),
        pad_id=0,
        device=learner.policy.device,
        progress=lambda done: None,
    )
    logprobs, values = ([np.asarray(row[place]) for row in found] for place in (0, 1))
    generator = np.random.default_rng(0)
    advantages = [generator.standard_normal(len(row)).astype(np.float32) for row in values]
    return Responses(
        sample_ids=[str(row) for row in range(len(found))],
        prompt_ids=rows.prompts,
        response_ids=rows.responses,
        logprobs=logprobs,
        ref_logprobs=logprobs,
        importance_weights=[np.ones_like(row) for row in values],
        advantages=advantages,
        values=values,
        returns=[value + advantage for value, advantage in zip(values, advantages, strict=True)],
        bootstrap_value=[0.0] * len(found),
        bootstrap_return=[None] * len(found),
    )


def chosen(responses: Responses, rows: list[int]) -> Responses:
    """Return some of the rows."""
    return Responses(**{name: [column[row] for row in rows] for name, column in vars(responses).items()})


if __name__ == "__main__":
    main()
