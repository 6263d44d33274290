"""Rows to the prompts artifact: ids, split, length limit."""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tqdm import tqdm

from rlhf_core.artifacts.schema import PROMPTS
from rlhf_core.errors import DataError
from rlhf_core.ingest.chat import prompt_ids, special_string
from rlhf_core.ingest.fields import Content
from rlhf_core.ingest.formats import Row
from rlhf_core.ingest.rules import Drops, content_key, kept_keys, side_of
from rlhf_core.ingest.shapes import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("rlhf")

_SHORTEST_HASH = 12  # hex digits of an id that is made here


def prompts_table(
    rows: Iterable[Row],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    read: Callable[[Row], Prompt],
    max_prompt_tokens: int,
    too_long: str,
    special_tokens_in_text: str,
    eval_fraction: float,
    fraction: float,
    seed: int,
    drops: Drops,
) -> tuple[pa.Table, dict[str, str]]:
    """Return the prompts artifact, in the order of the rows, and the side of every prompt.

    A prompt that occurs again is kept once, the first time. The side of a split and the fraction are chosen by content.

    Args:
        rows: Of a prompt file.
        tokenizer: Of the policy.
        read: shapes.prompt_of, its keys set.
        max_prompt_tokens: Longest prompt in ids, template included.
        too_long: "error", "drop" (counted) or "truncate_left": the last max_prompt_tokens ids, the BOS kept in front;
            the `prompt` column then holds the text of these ids, `messages` the whole conversation.
        special_tokens_in_text: "escape", "drop" (counted) or "error"; see chat.prompt_ids.
        eval_fraction: Part of the prompts held out, where a row has no split of its own.
        fraction: Part of the prompts kept.
        seed: The run's seed.
        drops: Counts what is left out, by PROMPT_RULES.

    Returns:
        (table with the schema PROMPTS, side (train | eval) of each content key, whether kept or not).

    Raises:
        DataError: With the row's position: as shapes.prompt_of and chat.prompt_ids, an id that two prompts share, a
            prompt that is too long.
    """
    if "strftime_now" in str(tokenizer.chat_template):
        logger.warning("the chat template writes today's date: the same prompts get other ids on another day")
    prompts = _without_duplicates(map(read, rows), drops)
    sides = {
        key: prompt.split or side_of(key, eval_fraction=eval_fraction, seed=seed) for key, prompt in prompts.items()
    }
    kept = kept_keys(sides, fraction=fraction, seed=seed)
    ids = _unique_ids(prompts)
    table: list[dict[str, Any]] = []
    for key, prompt in tqdm(prompts.items(), desc="prompts", unit="row", disable=None):
        if key not in kept:
            continue
        found = _rendered(prompt, tokenizer, max_prompt_tokens, too_long, special_tokens_in_text, drops)
        if found is not None:
            row = {"prompt_id": ids[key], "prompt": found[0], "prompt_ids": found[1], "split": sides[key]}
            table.append(row | _taken_over(prompt))
    return pa.Table.from_pylist(table, schema=PROMPTS), sides


def _rendered(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    too_long: str,
    special_tokens_in_text: str,
    drops: Drops,
) -> tuple[str, list[int]] | None:
    """Return a prompt's text and ids, within the limit; None where a rule drops it."""
    if special_tokens_in_text == "drop" and special_string(tokenizer, prompt.content) is not None:
        drops.add("special_tokens_in_prompt", prompt.where)
        return None
    rendered, tokens = at_row(prompt.where, tokenizer, prompt.content, special_tokens_in_text)
    if len(tokens) <= max_prompt_tokens:
        return rendered, tokens
    if too_long == "drop":
        drops.add("prompt_too_long", prompt.where)
        return None
    if too_long == "error":
        raise _too_long(prompt.where, len(tokens), max_prompt_tokens)
    drops.truncated += 1
    tokens = _last_tokens(tokens, max_prompt_tokens, tokenizer.bos_token_id)
    return str(tokenizer.decode(tokens, skip_special_tokens=False)), tokens


def _too_long(where: str, tokens: int, most: int) -> DataError:
    return DataError(
        f"{where}: the prompt has {tokens} tokens; ingest.max_prompt_tokens is"
        f" {most}: raise it, or set ingest.too_long to drop or truncate_left"
    )


def _taken_over(prompt: Prompt) -> dict[str, Any]:
    """Columns that are in the file as they are in the table."""
    return {
        "messages": None if isinstance(prompt.content, str) else prompt.content,
        "ground_truth": prompt.ground_truth,
        "source": prompt.source,
    }


def at_row(
    where: str, tokenizer: "PreTrainedTokenizerBase", content: Content, special_tokens_in_text: str
) -> tuple[str, list[int]]:
    """Return chat.prompt_ids, with the row's position in front of its errors."""
    try:
        return prompt_ids(tokenizer, content, special_tokens_in_text=special_tokens_in_text)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def short_hash(prefix: str, digest: str, taken: set[str]) -> str:
    """Return the prefix and the first 12 hex digits of a digest, more where another row has taken these."""
    length = _SHORTEST_HASH
    while prefix + digest[:length] in taken:
        length += 4
    return prefix + digest[:length]


def _without_duplicates(found: Iterable[Prompt], drops: Drops) -> dict[str, Prompt]:
    """Prompts by content key, in order."""
    prompts: dict[str, Prompt] = {}
    for prompt in found:
        key = content_key(prompt.content)
        if key in prompts:
            drops.add("duplicate_prompt", prompt.where)
        else:
            prompts[key] = prompt
    return prompts


def _unique_ids(prompts: dict[str, Prompt]) -> dict[str, str]:
    """The id of each prompt: its own, or "p" and a hash of its content."""
    owners: dict[str, Prompt] = {}
    for prompt in prompts.values():
        if prompt.prompt_id is None:
            continue
        if prompt.prompt_id in owners:
            other = owners[prompt.prompt_id].where
            raise DataError(f"{prompt.where}: prompt_id {prompt.prompt_id!r} is taken by another prompt, at {other}")
        owners[prompt.prompt_id] = prompt
    taken = set(owners)
    ids = {}
    for key, prompt in prompts.items():
        ids[key] = prompt.prompt_id or short_hash("p", key, taken)
        taken.add(ids[key])
    return ids


def _last_tokens(tokens: list[int], count: int, bos_id: int | None) -> list[int]:
    if bos_id is not None and tokens[0] == bos_id:
        return [bos_id, *tokens[len(tokens) - count + 1 :]]
    return tokens[-count:]
