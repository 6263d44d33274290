"""One PPO step of TRL's own PPOTrainer, timed: run by the Python of .venv-parity, see against_trl.py.

Generation, scoring and update are those of PPOTrainer.train(). After it has sampled, given responses take the place of
what it sampled, so that its update is measured on the very batch that ours is.
"""

import argparse
import json
import os
import resource
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


class Clock:
    """When TRL generated, and when its update began."""

    generation = 0.0  # seconds
    exchange = 0.0  # seconds that putting the given responses there took, which are none of TRL's
    update_began = 0.0


def main() -> None:
    """Load the models, run one step, write what it took."""
    arguments = parsed()
    rows = [json.loads(line) for line in arguments.rows.read_text(encoding="utf-8").splitlines()]
    trainer = new_trainer(arguments, [row["prompt_ids"] for row in rows])
    clock = Clock()
    with ExitStack() as stack:
        for name, replacement in hooks(clock, rows, arguments.max_new_tokens, arguments.micro_batch).items():
            stack.enter_context(mock.patch.object(ppo_trainer, name, replacement))
        began = time.perf_counter()
        trainer.train()
        ended = time.perf_counter()
    result = {
        "step_seconds": ended - began - clock.exchange,
        "generation_seconds": clock.generation,
        "update_seconds": ended - clock.update_began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    arguments.out.write_text(json.dumps(result), encoding="utf-8")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--reward-model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSONL of prompt_ids and response_ids")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="rows")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def new_trainer(arguments: argparse.Namespace, prompts: list[list[int]]) -> PPOTrainer:
    """Return TRL's trainer: one minibatch of all rows, and a value model of its own."""
    options: dict[str, Any] = {"dtype": getattr(torch, arguments.dtype)}
    tokenizer = AutoTokenizer.from_pretrained(arguments.policy, padding_side="left")
    classifier = AutoModelForSequenceClassification.from_pretrained
    reward_model, value_model = (classifier(arguments.reward_model, **options) for _ in range(2))
    config = PPOConfig(
        output_dir=str(arguments.out.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        num_sample_generations=0,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=len(prompts) // arguments.micro_batch,
        num_mini_batches=1,
        num_ppo_epochs=arguments.epochs,
        total_episodes=len(prompts),
        response_length=arguments.max_new_tokens,
        temperature=arguments.temperature,
        stop_token="eos",
    )
    rows = Dataset.from_dict({"input_ids": prompts})
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(arguments.policy, **options),
        ref_model=AutoModelForCausalLM.from_pretrained(arguments.policy, **options),
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=rows,
        eval_dataset=rows,
    )


def hooks(clock: Clock, given: list[dict[str, list[int]]], width: int, micro_batch: int) -> dict[str, Any]:
    """Return what stands for two of TRL's functions: they note the time, and one hands out the given responses."""
    generate, whiten = ppo_trainer.batch_generation, ppo_trainer.masked_whiten

    def without(pad_id: int, ids: list[int]) -> tuple[int, ...]:
        return tuple(token for token in ids if token != pad_id)  # the padding may stand in a prompt as its EOS, too

    def batch_generation(model: Any, queries: Tensor, batch: int, pad_id: int, generation: Any) -> Any:
        began = time.perf_counter()
        generate(model, queries, batch, pad_id, generation)
        generated = time.perf_counter()
        by_prompt = {without(pad_id, row["prompt_ids"]): row["response_ids"] for row in given}
        rows = [by_prompt[without(pad_id, query)] for query in queries.tolist()]
        both = torch.cat([queries, torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])], dim=1)
        logits = [
            ppo_trainer.forward(model, part, pad_id).logits[:, queries.shape[1] - 1 : -1] / generation.temperature
            for part in both.split(micro_batch)
        ]
        clock.generation += generated - began
        clock.exchange += time.perf_counter() - generated
        return both, torch.cat(logits)

    def masked_whiten(*inputs: Any, **options: Any) -> Tensor:
        found: Tensor = whiten(*inputs, **options)
        clock.update_began = time.perf_counter()  # the last thing before the epochs begin
        return found

    return {"batch_generation": batch_generation, "masked_whiten": masked_whiten}


if __name__ == "__main__":
    main()
