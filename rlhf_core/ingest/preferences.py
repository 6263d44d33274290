"""Rows to the preferences artifact: the shared prompt and two or more responses, ranked."""

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tqdm import tqdm

from rlhf_core.artifacts.schema import PREFERENCES
from rlhf_core.errors import DataError
from rlhf_core.ingest.chat import response_ids, special_string
from rlhf_core.ingest.formats import Row
from rlhf_core.ingest.prompts import at_row, short_hash
from rlhf_core.ingest.rules import Drops, content_key, kept_keys, side_of
from rlhf_core.ingest.shapes import Pair, Refused, pair_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preferences_table(
    rows: Iterable[Row],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    eos_id: int,
    max_pair_tokens: int,
    special_tokens_in_text: str,
    eval_fraction: float,
    fraction: float,
    seed: int,
    other_sides: dict[str, str],
    drops: Drops,
) -> pa.Table:
    """Return the preferences artifact, in the order of the rows. Of pairs, ranks are 0 for chosen, 1 for rejected.

    All pairs of a prompt are on one side of the split: that of its first row, else chosen by the prompt's content.

    Args:
        rows: Of a preference file.
        tokenizer: Of the policy.
        eos_id: Id that closes a response.
        max_pair_tokens: Longest prompt plus response in ids. A longer response is cut on the right, and loses its EOS.
        special_tokens_in_text: "escape", "drop" (counted) or "error", for prompt and responses.
        eval_fraction: Part of the prompts held out, where a row has no split of its own.
        fraction: Part of the prompts kept, all their pairs with them.
        seed: The run's seed.
        other_sides: Side of each content key in the prompts artifact; a pair whose prompt is on the other side there is
            dropped (counted).
        drops: Counts what is left out, by PAIR_RULES.

    Returns:
        Table with the schema PREFERENCES.

    Raises:
        DataError: With the row's position: as shapes.pair_of and chat.prompt_ids, an id that two pairs share.
    """
    pairs, sides = _sorted_out(rows, drops, other_sides, eval_fraction=eval_fraction, seed=seed)
    kept = kept_keys(sides, fraction=fraction, seed=seed)
    table: list[dict[str, Any]] = []
    for pair_id, (key, pair) in tqdm(_unique_ids(pairs).items(), desc="pairs", unit="row", disable=None):
        if key not in kept:
            continue
        if _has_special_tokens(pair, tokenizer, special_tokens_in_text):
            drops.add("special_tokens_in_pair", pair.where)
            continue
        rendered, prompt_tokens = at_row(pair.where, tokenizer, pair.content, special_tokens_in_text)
        whole = [response_ids(tokenizer, text, eos_id=eos_id) for text in pair.responses]
        room = max(0, max_pair_tokens - len(prompt_tokens))
        cut = [tokens[:room] for tokens in whole]
        if all(tokens == cut[0] for tokens in cut):
            identical = all(tokens == whole[0] for tokens in whole)
            drops.add("identical_pair" if identical else "identical_after_truncation", pair.where)
            continue
        drops.truncated += cut != whole
        row = {"pair_id": pair_id, "prompt": rendered, "prompt_ids": prompt_tokens, "response_ids": cut}
        table.append(row | _taken_over(pair) | {"split": sides[key]})
    return pa.Table.from_pylist(table, schema=PREFERENCES)


def _has_special_tokens(pair: Pair, tokenizer: "PreTrainedTokenizerBase", special_tokens_in_text: str) -> bool:
    """Whether a pair is to be dropped for the text of a special token in it; where that is an error, raise it."""
    if special_tokens_in_text == "escape":
        return False
    found = special_string(tokenizer, pair.content) or special_string(tokenizer, "\n".join(pair.responses))
    if found is not None and special_tokens_in_text == "error":
        raise DataError(
            f"{pair.where}: the text contains the special token {found!r}; set ingest.special_tokens_in_text to"
            " escape or drop"
        )
    return found is not None


def _taken_over(pair: Pair) -> dict[str, Any]:
    """Columns that are in the file as they are in the table."""
    return {
        "messages": None if isinstance(pair.content, str) else pair.content,
        "responses": pair.responses,
        "ranks": pair.ranks,
        "margin": pair.margin,
        "agreement": pair.agreement,
        "source": pair.source,
    }


def _sorted_out(
    rows: Iterable[Row], drops: Drops, other_sides: dict[str, str], *, eval_fraction: float, seed: int
) -> tuple[list[tuple[str, Pair]], dict[str, str]]:
    """Pairs with their content keys, and the side of each key."""
    pairs: list[tuple[str, Pair]] = []
    sides: dict[str, str] = {}
    seen: set[str] = set()
    for row in rows:
        pair = pair_of(row)
        if isinstance(pair, Refused):
            drops.add(pair.rule, pair.where)
            continue
        key = content_key(pair.content)
        side = sides.get(key) or pair.split or side_of(key, eval_fraction=eval_fraction, seed=seed)
        content = _content(key, pair)
        if content in seen:
            drops.add("duplicate_pair", pair.where)
        elif pair.split not in (None, side):
            drops.add("prompt_on_both_sides", pair.where)
        elif other_sides.get(key, side) != side:
            drops.add("prompt_on_other_side", pair.where)
        else:
            sides[key] = side
            seen.add(content)
            pairs.append((key, pair))
    return pairs, sides


def _unique_ids(pairs: list[tuple[str, Pair]]) -> dict[str, tuple[str, Pair]]:
    """Pairs by id: their own, or "q" and a hash of prompt and responses."""
    owners: dict[str, Pair] = {}
    for _, pair in pairs:
        if pair.pair_id is None:
            continue
        if pair.pair_id in owners:
            other = owners[pair.pair_id].where
            raise DataError(f"{pair.where}: pair_id {pair.pair_id!r} is taken by another pair, at {other}")
        owners[pair.pair_id] = pair
    taken = set(owners)
    named = {}
    for key, pair in pairs:
        digest = hashlib.sha256(_content(key, pair).encode()).hexdigest()
        pair_id = pair.pair_id or short_hash("q", digest, taken)
        taken.add(pair_id)
        named[pair_id] = (key, pair)
    return named


def _content(key: str, pair: Pair) -> str:
    """All that a row says, as one text: equal for duplicates only. The ranks 0, 1 of a pair go without saying."""
    said = [key, *pair.responses, *([] if pair.ranks == [0, 1] else [pair.ranks])]
    return json.dumps(said, ensure_ascii=False)
