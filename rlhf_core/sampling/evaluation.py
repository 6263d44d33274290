"""Sampling of the held-out prompts, in a process of its own: the engine's memory is free again before models load."""

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.errors import RlhfError
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.sampling.engine import Sampler
from rlhf_core.sampling.rollouts import cut, read_prompts, sample_shards, unfinished
from rlhf_core.stage import die_with_parent

_SHARD_PROMPTS = 64  # how often the progress bar moves, and what a crash costs


def sample_held_out(
    prompts: Path,
    policy: Path,
    out: Path,
    metadata: dict[str, Any],
    *,
    max_prompts: int | None,
    samples_per_prompt: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    **engine: Any,
) -> None:
    """Sample responses to the held-out prompts into shards of the rollouts schema, keeping those that are there.

    Args:
        prompts: The prompts artifact; its rows of split eval are taken in file order.
        policy: Directory of the model that samples.
        out: Directory of the shards.
        metadata: Of the shards; has iteration and eos_ids.
        max_prompts: The first so many; None = all.
        samples_per_prompt: Responses per prompt.
        temperature: 0 = greedy.
        max_new_tokens: Tokens, EOS included.
        seed: Of the engine; samples are seeded by it and the shard, so that every iteration draws with the same seeds.
        engine: The other arguments of Sampler.

    Raises:
        DataError: If there is no held-out prompt.
        RlhfError: What stopped the sampling process, or that it died.
    """
    shards = cut(read_prompts(prompts, "eval")[:max_prompts], _SHARD_PROMPTS)
    iteration = metadata["iteration"]
    missing = unfinished(out, shards, iteration=iteration, n=samples_per_prompt, metadata=metadata)
    if not missing:
        return
    request = {
        "directory": out,
        "shards": shards,
        "missing": missing,
        "iteration": iteration,
        "seed": seed,
        "n": samples_per_prompt,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "eos_ids": metadata["eos_ids"],
        "metadata": metadata,
    }
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_sample, args=(sender, policy, request, {**engine, "seed": seed}))
    child.start()
    sender.close()
    try:
        failure = receiver.recv()
    except EOFError:
        failure = RlhfError("the sampling process died without a word; was it killed for lack of memory?")
    child.join()
    if failure is not None:
        raise failure


def _sample(sender: Any, policy: Path, request: dict[str, Any], engine: dict[str, Any]) -> None:
    """Sample and write in the child; send back None, or the error for the parent to raise."""
    die_with_parent()
    try:
        decode: Any = partial(load_tokenizer(policy).decode, skip_special_tokens=True)
        sample_shards(Sampler(policy, **engine), decode=decode, **request)
    except RlhfError as error:
        sender.send(error)
    else:
        sender.send(None)
