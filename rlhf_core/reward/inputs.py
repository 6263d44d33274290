"""What a reward model reads of each sampled response: the policy's ids, or texts where its tokenizer is another."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.provenance import hash_tokenizer
from rlhf_core.artifacts.shards import read_shard, read_table, shard_metadata
from rlhf_core.errors import ModelError, RowMismatch
from rlhf_core.models.reward_text import text_ids, text_reader
from rlhf_core.models.tokenizer import load_tokenizer

Ids = tuple[list[list[int]], list[list[int]]]  # prompt ids and response ids of each row
ReadsRows = Callable[[Path], Ids]  # of a shard


def reward_inputs(
    directory: Path, model: Any, *, shard: Path, prompts: Path, eos_ids: Sequence[int], pad_id: int
) -> tuple[ReadsRows, int]:
    """Return how a reward model reads a shard, and its pad id.

    With the policy's tokenizer it takes prompt and response ids; a response that was cut off is closed by an EOS. With
    another one it reads the turns (or the text) of data/prompts and the response's text.

    Args:
        directory: Of the reward model, with its tokenizer.
        model: The sequence classifier loaded from there.
        shard: Any of the responses' shards, for the tokenizer's hash in its metadata.
        prompts: data/prompts; read only where the tokenizers differ.
        eos_ids: Of the policy.
        pad_id: Of the policy.

    Raises:
        ModelError: While reading, if the model has no embedding or position for what it would read.
    """
    if hash_tokenizer(directory) == shard_metadata(shard)["tokenizer"]:

        def closed(path: Path) -> Ids:
            found, responses = policy_ids(path)
            return found, [ids if ids and ids[-1] in eos_ids else [*ids, eos_ids[0]] for ids in responses]

        return within_bounds(closed, model, directory), pad_id
    reader = text_reader(model, load_tokenizer(directory))
    table = read_table(prompts, ["prompt_id", "messages", "prompt"])
    contents = {row["prompt_id"]: row["messages"] or row["prompt"] for row in table.to_pylist()}

    def read(path: Path) -> Ids:
        pairs = []
        for row in read_shard(path, ["sample_id", "prompt_id", "response"]).to_pylist():
            if row["prompt_id"] not in contents:
                raise RowMismatch(
                    f"{path}: sample {row['sample_id']} answers prompt {row['prompt_id']}, which {prompts} does not"
                    " hold; run `dvc repro`"
                )
            pairs.append(text_ids(reader, contents[row["prompt_id"]], row["response"]))
        return [prompt for prompt, _ in pairs], [response for _, response in pairs]

    return read, int(model.config.pad_token_id)


def within_bounds(read: ReadsRows, model: Any, directory: Path) -> ReadsRows:
    """Return a reader of the policy's ids that refuses rows which a model cannot read.

    Args:
        read: Gives the policy's ids.
        model: With an embedding of its own: a policy's vocabulary may be padded further beyond the tokenizer's.
        directory: Of the model, for messages.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def bounded(path: Path) -> Ids:
        prompts, responses = read(path)
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        most = max((max(ids, default=0) for ids in rows), default=0)
        longest = max(map(len, rows), default=0)
        if most >= vocabulary:
            raise ModelError(
                f"{directory}: has {vocabulary} embedding rows, but {path} holds the token id {most}, which the"
                " policy's padded vocabulary has: give the model as many rows (resize_token_embeddings)"
            )
        if positions is not None and longest > positions:
            raise ModelError(
                f"{directory}: has {positions} positions, but a row of {path} has {longest} tokens; give a model with"
                " more, or lower sampling.max_model_len"
            )
        return prompts, responses

    return bounded


def policy_ids(path: Path) -> Ids:
    """Return prompt ids and response ids of each row of a shard."""
    table = read_shard(path, ["prompt_ids", "response_ids"])
    return table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist()
