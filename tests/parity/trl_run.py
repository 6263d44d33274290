"""One update of TRL's own PPOTrainer on responses that are given, and what it computed on the way.

Nothing of TRL is rewritten: its train() runs as it is. Only the sampler is replaced, so that the responses are known,
and the local variables of train() are read where it whitens advantages and where its optimiser steps.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from tests.tiny import tiny_tokenizer

_BEFORE = ("queries", "responses", "logprobs", "ref_logprobs", "values", "scores", "rewards", "advantages", "returns")
_AT_STEP = ("pg_loss", "vf_loss", "loss", "vf_clipfrac")


@dataclass
class Models:
    """The models of one update, on the CPU in float32."""

    policy: PreTrainedModel
    sampler: PreTrainedModel  # whose logprobs are the old ones: the policy, slightly disturbed
    reference: PreTrainedModel
    value_model: PreTrainedModel  # sequence classifier with one label
    reward_model: PreTrainedModel  # sequence classifier with one label


@dataclass
class Captured:
    """What PPOTrainer.train computed."""

    # Its variables before the first step, [B, W] or [B], rows in the caller's order; and "whitened", the advantages of
    # the policy loss, "token_mask", True = real token, "value_mask", True = has a value.
    before: dict[str, Tensor] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)  # losses and gradient norm of every step


class _RecordingSGD(torch.optim.SGD):
    """Plain gradient descent that tells when it steps."""

    def __init__(self, parameters: Any, *, lr: float, on_step: Callable[[], None]) -> None:
        super().__init__(parameters, lr=lr)
        self._on_step = on_step

    def step(self, closure: Any = None) -> None:
        """Tell, then step."""
        self._on_step()
        super().step(closure)


def run(
    models: Models,
    prompts: list[list[int]],
    responses: list[list[int]],
    directory: Path,
    *,
    width: int,
    learning_rate: float,
    **options: Any,
) -> Captured:
    """Let PPOTrainer do one update, all rows in one minibatch and one micro-batch, and return what it computed.

    Args:
        models: Policy and value model are trained in place.
        prompts: [B] of token ids, no two alike (TRL shuffles rows).
        responses: [B] of token ids, ended by EOS where finished.
        directory: For TRL's output.
        width: Its response_length.
        learning_rate: Of gradient descent.
        options: Further fields of PPOConfig.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    captured = Captured()
    trained = nn.ModuleList([models.policy, models.value_model])

    def on_step() -> None:
        variables = _frame_of_train().f_locals
        gradients = [p.grad for p in trained.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        step = {name: float(variables[name].detach()) for name in _AT_STEP}
        captured.steps.append(step | {"grad_norm": float(norm)})

    optimizer = _RecordingSGD(trained.parameters(), lr=learning_rate, on_step=on_step)
    arguments = PPOConfig(
        output_dir=str(directory),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        num_sample_generations=0,
        per_device_train_batch_size=len(prompts),
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        total_episodes=len(prompts),
        response_length=width,
        stop_token="eos",
        **options,
    )
    rows = Dataset.from_dict({"input_ids": prompts})
    with _given_responses(models.sampler, prompts, responses, width), _read_at_whitening(captured):
        PPOTrainer(
            args=arguments,
            processing_class=tokenizer,
            model=models.policy,
            ref_model=models.reference,
            reward_model=models.reward_model,
            value_model=models.value_model,
            train_dataset=rows,
            eval_dataset=rows,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        ).train()
    queries = [
        [token for token in query if token != tokenizer.pad_token_id] for query in captured.before["queries"].tolist()
    ]
    order = [queries.index(prompt) for prompt in prompts]
    captured.before = {name: tensor[order] for name, tensor in captured.before.items()}
    return captured


@contextmanager
def _given_responses(
    sampler: PreTrainedModel, prompts: list[list[int]], responses: list[list[int]], width: int
) -> Iterator[None]:
    """Put given responses, and the logits of `sampler` on them, where TRL samples."""
    by_prompt = {tuple(prompt): response for prompt, response in zip(prompts, responses, strict=True)}
    original = ppo_trainer.batch_generation

    def batch_generation(
        model: Any, queries: Tensor, batch: int, pad_id: int, generation: Any
    ) -> tuple[Tensor, Tensor]:
        rows = [by_prompt[tuple(token for token in query if token != pad_id)] for query in queries.tolist()]
        padded = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
        query_responses = torch.cat([queries, padded], dim=1)
        output = ppo_trainer.forward(sampler, query_responses, pad_id)
        return query_responses, output.logits[:, queries.shape[1] - 1 : -1] / generation.temperature

    ppo_trainer.batch_generation = batch_generation
    try:
        yield
    finally:
        ppo_trainer.batch_generation = original


@contextmanager
def _read_at_whitening(captured: Captured) -> Iterator[None]:
    """Read the variables of train() when it whitens the advantages: all that the losses need is there by then."""
    original = ppo_trainer.masked_whiten

    def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        whitened = original(values, mask, shift_mean=shift_mean)
        if shift_mean:  # rewards, which TRL whitens too if told to, keep their mean
            variables = _frame_of_train().f_locals
            captured.before = {name: variables[name].clone() for name in _BEFORE}
            captured.before["token_mask"] = ~variables["padding_mask"]
            captured.before["value_mask"] = ~variables["padding_mask_p1"]
            captured.before["whitened"] = whitened.clone()
        return whitened

    ppo_trainer.masked_whiten = masked_whiten
    try:
        yield
    finally:
        ppo_trainer.masked_whiten = original


def _frame_of_train() -> FrameType:
    """Return the running frame of PPOTrainer.train."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not PPOTrainer.train.__code__:
        frame = frame.f_back
    assert frame is not None
    return frame
