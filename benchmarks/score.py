"""The model passes of the score stage beside bare forward passes of the same models, in tokens per second and memory.

    python -m benchmarks.score                 # the model of the demo, some minutes

Three models, loaded one after the other: the policy with a shared critic, the reference, and a reward model. bare: each
is loaded and run over batches sorted by length, logprobs from whole logits at the response tokens. passes: what the
stage runs, its arrays written shard by shard.
"""

import argparse
import shutil
import time
from pathlib import Path

import pyarrow as pa
import torch
from torch import nn
from transformers import AutoConfig

from benchmarks import cases, measure
from rlhf_core.artifacts.provenance import hash_tokenizer
from rlhf_core.artifacts.schema import ROLLOUTS
from rlhf_core.artifacts.shards import shard_name, write_shard
from rlhf_core.models.batching import Batch, collate, token_budget_batches
from rlhf_core.models.checkpoint import new_value_head, save_critic, save_normalisation
from rlhf_core.models.critic import Critic
from rlhf_core.models.forward import autocast, sequence_scores
from rlhf_core.models.loading import (
    hidden_size,
    load_causal_lm,
    load_classifier,
    new_classifier,
    save_like,
    torch_device,
)
from rlhf_core.models.memory import keep_freed_memory
from rlhf_core.reward.passes import Passes, numbered

MODULE = "benchmarks.score"
TEMPERATURE = 0.7
SHARD = 64  # responses


def main() -> None:
    """Measure, print the table, write the result; or run one contender."""
    arguments = cases.parsed(MODULE, __doc__, responses=256)
    if arguments.only:
        keep_freed_memory()
        rows = made_up(arguments)
        seconds = {"bare": timed_bare, "passes": timed_passes}[arguments.only](arguments, rows)
        cases.note(arguments, seconds=seconds, tokens=3 * sum(rows.lengths))
        return
    found = cases.take_turns(MODULE, ["bare", "passes"], arguments)
    result = cases.compared(found, "bare")
    print(cases.comparison_table(f"score: {arguments.responses} responses, {arguments.precision}", result))
    print(f"\n{measure.written('score', {'contenders': result}, arguments.json)}")


def made_up(arguments: argparse.Namespace) -> cases.Rows:
    """Return the rows, after writing the reward model, the critic and the shards that both contenders read."""
    work, model = arguments.work, Path(arguments.model)
    rows = cases.made_up_rows(arguments, AutoConfig.from_pretrained(model).vocab_size)
    if (work / "rollouts").is_dir():
        return rows
    classifier = new_classifier(model, device=torch_device("cpu"), precision="bfloat16", seed=0)
    save_like(classifier, model, work / "reward_model", card="# A reward model that learned nothing\n")
    save_normalisation(work / "reward_model", mean=0.0, std=1.0, measured_on="nothing")
    save_critic(Critic(new_value_head(hidden_size(model))), work / "critic")
    for index, start in enumerate(range(0, arguments.responses, SHARD)):
        part = slice(start, start + SHARD)
        table = rollouts(rows.prompts[part], rows.responses[part], start)
        write_shard(work / "rollouts" / shard_name(index), table, ROLLOUTS, {"tokenizer": hash_tokenizer(model)})
    return rows


def rollouts(prompts: list[list[int]], responses: list[list[int]], first: int) -> pa.Table:
    """Return one shard of rollouts."""
    names = [f"1-p{first + place}-0" for place in range(len(prompts))]
    columns = {
        "sample_id": names,
        "prompt_id": names,
        "sample_index": [0] * len(names),
        "prompt": [""] * len(names),
        "prompt_ids": prompts,
        "response": [""] * len(names),
        "response_ids": responses,
        "sampler_logprobs": [[-1.0] * len(response) for response in responses],
        "finish_reason": ["stop"] * len(names),
        "ground_truth": [None] * len(names),
    }
    return pa.table(columns, schema=ROLLOUTS)


def timed_passes(arguments: argparse.Namespace, rows: cases.Rows) -> float:
    """Return the seconds of the stage's passes, models loaded."""
    work, model = arguments.work, Path(arguments.model)
    shutil.rmtree(work / "passes", ignore_errors=True)
    passes = Passes(
        shards=numbered([work / "rollouts"]), prompts=work / "prompts", work=work / "passes", device="auto",
        precision=arguments.precision, max_batch_tokens=arguments.max_batch_tokens,
        logits_chunk_tokens=arguments.logits_chunk_tokens, temperature=TEMPERATURE, pad_id=0, eos_ids=[0],
    )  # fmt: skip
    started = time.perf_counter()
    passes.token_logprobs("logprobs", model, work / "critic")
    passes.token_logprobs("ref_logprobs", model)
    passes.reward_model("score_reward_model", work / "reward_model")
    return time.perf_counter() - started


def timed_bare(arguments: argparse.Namespace, rows: cases.Rows) -> float:
    """Return the seconds of the same models over the same rows, models loaded."""
    device, precision = torch_device("auto"), arguments.precision
    groups = token_budget_batches(rows.lengths, max_batch_tokens=arguments.max_batch_tokens)
    batches = [collate(rows.prompts, rows.responses, group, pad_id=0, device=device) for group in groups]
    started = time.perf_counter()
    with torch.inference_mode():
        for head in (new_value_head(hidden_size(Path(arguments.model))).to(device), None):
            model = load_causal_lm(Path(arguments.model), device=device, precision=precision)
            for batch in batches:
                bare(model, head, batch, precision)
            del model
        classifier = load_classifier(arguments.work / "reward_model", device=device, precision=precision)
        for batch in batches:
            sequence_scores(classifier, batch, precision=precision).cpu()
    return time.perf_counter() - started


def bare(model: torch.nn.Module, head: nn.Linear | None, batch: Batch, precision: str) -> None:
    """Compute logprobs, and values where there is a head."""
    with autocast(batch.input_ids.device, precision):
        hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    states = hidden.flatten(0, 1).index_select(0, batch.predictors)
    weight = model.get_output_embeddings().weight
    logits = nn.functional.linear(states.to(weight.dtype), weight).float() / TEMPERATURE
    torch.log_softmax(logits, -1).gather(-1, batch.targets[:, None]).cpu()
    if head is not None:
        head(states.float()).cpu()


if __name__ == "__main__":
    main()
