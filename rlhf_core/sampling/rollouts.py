"""What an iteration samples: which prompts, cut into which shards, and the rows made of the answers.

A shard is the unit that is sampled, seeded, written and resumed. Left out: vLLM itself (engine.py).
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from rlhf_core.artifacts.checks import list_lengths
from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import ROLLOUTS, SCHEMA_VERSION
from rlhf_core.artifacts.shards import (
    read_shard,
    read_table,
    remove_unfinished,
    shard_metadata,
    shard_name,
    write_shard,
)
from rlhf_core.errors import ConfigError, DataError, RlhfError, RowMismatch
from rlhf_core.sampling.engine import Sample, token_budgets
from rlhf_core.seeding import derive_seed
from rlhf_core.stage import write_json

logger = logging.getLogger("rlhf")

_RECORD = "published.json"


@dataclass(frozen=True)
class Prompt:
    """One row of data/prompts, as far as sampling needs it."""

    prompt_id: str
    prompt: str  # rendered
    prompt_ids: list[int]  # what is sent to the model
    ground_truth: str | None


class SamplesResponses(Protocol):
    """The part of engine.Sampler that is used here."""

    def sample(
        self,
        prompt_ids: list[list[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        eos_ids: list[int],
        seed: int,
        names: Sequence[str] | None = None,
    ) -> list[list[Sample | None]]:
        """Sample n responses to each prompt; None for one that was dropped."""


def read_prompts(directory: Path, split: str) -> list[Prompt]:
    """Read one split of data/prompts, in the order of its rows.

    Raises:
        DataError: If the split has no prompt. ArtifactError: As read_table.
    """
    table = read_table(directory, ["prompt_id", "prompt", "prompt_ids", "ground_truth", "split"])
    rows = table.filter(pc.equal(table["split"], split)).drop_columns("split").to_pylist()
    if not rows:
        raise DataError(
            f"{directory}: no prompt of split {split!r} among {table.num_rows}; change ingest.eval_fraction"
        )
    return [Prompt(**row) for row in rows]


def choose_prompts(prompts: Sequence[Prompt], *, seed: int, position: int, count: int) -> list[Prompt]:
    """Return `count` prompts from place `position` of an endless walk through all of them in one seeded order.

    The order depends on the seed and the prompt ids only, not on the order of the rows. No prompt comes again before
    all others have come.

    Args:
        prompts: All prompts of the split.
        seed: The run's seed.
        position: How many prompts the earlier iterations of the chain took.
        count: Prompts to take.

    Raises:
        ConfigError: If there are fewer prompts than that: an iteration takes none twice.
    """
    if count > len(prompts):
        raise ConfigError(
            f"rollout.prompts_per_iteration is {count}, but data/prompts has {len(prompts)} prompts of split train; an"
            " iteration takes none twice. Lower it (and raise samples_per_prompt), or ingest more prompts"
        )
    order = sorted(prompts, key=lambda prompt: derive_seed(seed, "prompt order", prompt.prompt_id))
    return [order[(position + step) % len(order)] for step in range(count)]


def check_lengths(prompts: Sequence[Prompt], *, max_model_len: int) -> None:
    """Refuse prompts that leave no room for one token, before the engine starts.

    Raises:
        DataError: Naming them.
    """
    names = [prompt_name(prompt) for prompt in prompts]
    token_budgets([prompt.prompt_ids for prompt in prompts], max_new_tokens=1, max_model_len=max_model_len, names=names)


def cut(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Return consecutive groups of `size` prompts; the last one may be smaller. No prompts are one empty group."""
    return [list(prompts[start : start + size]) for start in range(0, len(prompts), size)] or [[]]


def most_bytes(prompts: Sequence[Prompt], n: int, max_new_tokens: int) -> int:
    """Return the most that n samples of each prompt take on disk: ids, logprobs and text, before compression."""
    # A token is an id and a logprob of 4 bytes each, and about as many bytes of text as an id.
    return n * sum(len(prompt.prompt.encode()) + 4 * len(prompt.prompt_ids) + 12 * max_new_tokens for prompt in prompts)


def rollout_table(
    iteration: str,
    prompts: Sequence[Prompt],
    samples: Sequence[Sequence[Sample | None]],
    decode: Callable[[list[int]], str],
) -> pa.Table:
    """Return one row per sample, ordered by prompt and sample index, in the schema ROLLOUTS.

    Args:
        iteration: Enters the sample ids, "<iteration>-<prompt_id>-<sample_index>".
        prompts: [P].
        samples: [P][n]; None for a response that was dropped, which then has no row.
        decode: From response ids to the text that people read.
    """
    rows = [
        {
            "sample_id": sample_id(iteration, prompt, index),
            "prompt_id": prompt.prompt_id,
            "sample_index": index,
            "prompt": prompt.prompt,
            "prompt_ids": prompt.prompt_ids,
            "response": decode(sample.response_ids),
            "response_ids": sample.response_ids,
            "sampler_logprobs": sample.sampler_logprobs,
            "finish_reason": sample.finish_reason,
            "ground_truth": prompt.ground_truth,
        }
        for prompt, own in zip(prompts, samples, strict=True)
        for index, sample in enumerate(own)
        if sample is not None
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def sample_id(iteration: str, prompt: Prompt, index: int) -> str:
    """Return the key of one sample."""
    return f"{iteration}-{prompt.prompt_id}-{index}"


def unfinished(
    directory: Path, shards: Sequence[Sequence[Prompt]], *, iteration: str, n: int, metadata: dict[str, Any]
) -> list[int]:
    """Return the numbers of the shards that are still to be sampled, and say which files are made again and why.

    A shard counts as finished when its file can be read in full, passes every check of rows, and holds exactly the
    samples and the metadata that it should.

    Args:
        directory: Partial work, maybe empty. What interrupted writes left there is removed.
        shards: The prompts of each shard.
        iteration: As in rollout_table.
        n: Samples per prompt.
        metadata: As it will be written.
    """
    for name in remove_unfinished(directory):
        logger.info("removed %s, an interrupted write", directory / name)
    missing = []
    for number, prompts in enumerate(shards):
        path = directory / shard_name(number)
        if not path.exists():
            missing.append(number)
            continue
        try:
            found = read_shard(path)["sample_id"].to_pylist()
            expected = [sample_id(iteration, prompt, index) for prompt in prompts for index in range(n)]
            if metadata["sampling"]["nonfinite_logprobs"] == "drop":
                expected = [name for name in expected if name in set(found)]  # a dropped response has no row
            if found != expected or shard_metadata(path) != {**metadata, "schema_version": SCHEMA_VERSION}:
                raise RowMismatch(f"{path}: holds other samples than this iteration's")
        except RlhfError as error:
            logger.warning("sampling shard %d again: %s", number, error)
            path.unlink()
            missing.append(number)
    if len(missing) < len(shards):
        logger.info("keeping %d of %d shards that were finished before", len(shards) - len(missing), len(shards))
    return missing


def sample_shards(
    sampler: SamplesResponses,
    directory: Path,
    shards: Sequence[Sequence[Prompt]],
    missing: Sequence[int],
    decode: Callable[[list[int]], str],
    *,
    iteration: str,
    seed: int,
    n: int,
    temperature: float,
    max_new_tokens: int,
    eos_ids: list[int],
    metadata: dict[str, Any],
) -> None:
    """Sample shards and write each as soon as it is done, under a progress bar with tokens per second.

    Args:
        sampler: A running engine.
        directory: Where the shards go.
        shards: The prompts of each shard.
        missing: Numbers of the shards to sample, from `unfinished`.
        decode: From response ids to text.
        iteration: Enters the sample ids.
        seed: Shard i is sampled with derive_seed(seed, i), whichever shards are sampled before it.
        n: Samples per prompt.
        temperature: As Sampler.sample.
        max_new_tokens: As Sampler.sample.
        eos_ids: As Sampler.sample.
        metadata: For the files' footers.
    """
    tokens, start = 0, time.monotonic()
    with tqdm(total=len(shards), initial=len(shards) - len(missing), desc="sampling", unit="shard") as bar:
        for number in missing:
            prompts = shards[number]
            samples = sampler.sample(
                [prompt.prompt_ids for prompt in prompts],
                n=n,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                eos_ids=eos_ids,
                seed=derive_seed(seed, number),
                names=[prompt_name(prompt) for prompt in prompts],
            )
            table = rollout_table(iteration, prompts, samples, decode)
            write_shard(directory / shard_name(number), table, ROLLOUTS, metadata)
            tokens += sum(len(sample.response_ids) for own in samples for sample in own if sample is not None)
            bar.set_postfix_str(f"{tokens / (time.monotonic() - start):.0f} tokens/s")
            bar.update()


def write_empty_shard(directory: Path, metadata: dict[str, Any]) -> None:
    """Write the one shard of an iteration that samples nothing and trains on replayed responses alone."""
    write_shard(directory / shard_name(0), ROLLOUTS.empty_table(), ROLLOUTS, metadata)


def prompt_name(prompt: Prompt) -> str:
    """Return what a prompt is called in messages."""
    return f"prompt_id {prompt.prompt_id!r}"


def rollout_metrics(directory: Path, *, asked: int) -> dict[str, float]:
    """Return counts and means over all responses of an iteration; without any, what is a mean over them is missing.

    Args:
        directory: All shards.
        asked: Responses that the sampler was asked for, dropped ones included.
    """
    table = read_table(directory, ["response_ids", "finish_reason"])
    lengths = list_lengths(table["response_ids"])
    metrics: dict[str, float] = {
        "rollout/responses": table.num_rows,
        "dropped/nonfinite_logprob": asked - table.num_rows,
        "rollout/tokens": int(lengths.sum()),
        "rollout/empty_responses": int((lengths == 0).sum()),
    }
    if table.num_rows:
        metrics["rollout/finished"] = pc.mean(pc.equal(table["finish_reason"], "stop")).as_py()
        metrics["rollout/response_length_mean"] = float(lengths.mean())
    return metrics


def remember(work: Path) -> None:
    """Note, beside finished work that is about to be published, what it is."""
    write_json(work.parent / _RECORD, {"work": work.name, "content": hash_path(work)})


def is_published(work: Path, out: Path) -> bool:
    """Whether `out` is, byte for byte, what this very work published before; then nothing is left to do."""
    record = work.parent / _RECORD
    if not record.is_file() or not out.is_dir():
        return False
    return bool(json.loads(record.read_text()) == {"work": work.name, "content": hash_path(out)})
