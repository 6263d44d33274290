"""Rules that rows are dropped, split and thinned out by: counted, by content, and the same on every machine.

Both sides of a split and a fraction are chosen by a hash of the prompt's content, never of its position: all pairs of a
prompt stay together, and prompts and preferences agree about a prompt that is in both.
"""

import hashlib
import json
import logging
from collections.abc import Iterable

import pyarrow as pa

from rlhf_core.errors import ConfigError
from rlhf_core.ingest.fields import Content
from rlhf_core.seeding import derive_seed

logger = logging.getLogger("rlhf")

PROMPT_RULES = ("duplicate_prompt", "prompt_too_long", "special_tokens_in_prompt")
PAIR_RULES = (
    "identical_pair",
    "identical_after_truncation",
    "duplicate_pair",
    "empty_response",
    "no_shared_prompt",
    "differing_histories",
    "roles_not_alternating",
    "prompt_on_both_sides",
    "prompt_on_other_side",
    "special_tokens_in_pair",
)

_EXAMPLES = 5  # positions shown in the log for each rule


class Drops:
    """The rows that each rule dropped, and how many were cut to length."""

    def __init__(self, what: str, rules: Iterable[str]) -> None:
        """Start with every rule at 0.

        Args:
            what: What is counted, for the log: "prompts" or "pairs".
            rules: All rules that may drop a row.
        """
        self.what = what
        self._where: dict[str, list[str]] = {rule: [] for rule in rules}
        self.truncated = 0

    def add(self, rule: str, where: str) -> None:
        """Count one row that is left out."""
        self._where[rule].append(where)

    def counts(self) -> dict[str, int]:
        """Rows dropped by each rule, rules that dropped none included."""
        return {rule: len(places) for rule, places in self._where.items()}

    def log(self) -> None:
        """Write one line for each rule that dropped a row, with the first positions, and one for cut rows."""
        for rule, places in self._where.items():
            if places:
                first = ", ".join(places[:_EXAMPLES]) + (", ..." if len(places) > _EXAMPLES else "")
                logger.info("dropped %d %s (%s): %s", len(places), self.what, rule, first)
        if self.truncated:
            logger.info("cut %d %s to the token limit", self.truncated, self.what)


def content_key(content: Content) -> str:
    """Return the SHA-256 of a prompt's content as 64 hex digits: equal for equal text or equal turns only."""
    turns = content if isinstance(content, str) else [[turn["role"], turn["content"]] for turn in content]
    return hashlib.sha256(json.dumps(turns, ensure_ascii=False).encode()).hexdigest()


def side_of(key: str, *, eval_fraction: float, seed: int) -> str:
    """Return "eval" for about eval_fraction of all prompts, else "train".

    Args:
        key: From content_key.
        eval_fraction: In (0, 1).
        seed: The run's seed.
    """
    return "eval" if _uniform(seed, "split", key) < eval_fraction else "train"


def kept_keys(sides: dict[str, str], *, fraction: float, seed: int) -> set[str]:
    """Return the prompts of a trial run: those whose hash falls below `fraction`, at least one of each side.

    A smaller fraction keeps a subset of what a larger one keeps.

    Args:
        sides: Side (train | eval) of each content key.
        fraction: In (0, 1]; 1 keeps all.
        seed: The run's seed.
    """
    place = {key: _uniform(seed, "fraction", key) for key in sides}
    kept = {key for key in sides if place[key] < fraction}
    for side in ("train", "eval"):
        members = [key for key in sides if sides[key] == side]
        if members and kept.isdisjoint(members):
            kept.add(min(members, key=lambda key: place[key]))
    return kept


def require_both_sides(table: pa.Table, drops: Drops, *, source: str) -> None:
    """Log what was dropped, and refuse data that has nothing to train on or nothing held out.

    Args:
        table: The rows that are left.
        drops: What was left out.
        source: Where the rows came from.

    Raises:
        ConfigError: With the counts of both sides.
    """
    drops.log()
    train, held_out = (table["split"].to_pylist().count(side) for side in ("train", "eval"))
    if train and held_out:
        return
    lost = ", ".join(f"{rule} {count}" for rule, count in drops.counts().items() if count) or "none"
    raise ConfigError(
        f"{source}: {train} train and {held_out} eval {drops.what} are left (dropped: {lost}); at least one of each is"
        " needed: add rows, give them a split key, or change ingest.eval_fraction"
    )


def ingest_metrics(prompts: pa.Table, prompt_drops: Drops, pairs: pa.Table, pair_drops: Drops) -> dict[str, int]:
    """Return data/metrics/ingest.json: prompts and pairs left on each side, dropped by each rule, and cut to length."""
    metrics: dict[str, int] = {}
    for table, drops in ((prompts, prompt_drops), (pairs, pair_drops)):
        splits = table["split"].to_pylist()
        metrics |= {f"{drops.what}/{side}": splits.count(side) for side in ("train", "eval")}
        metrics |= {f"dropped/{rule}": count for rule, count in drops.counts().items()}
        metrics[f"truncated/{drops.what}"] = drops.truncated
    return metrics


def _uniform(seed: int, purpose: str, key: str) -> float:
    return derive_seed(seed, "ingest", purpose, key) / 2**63
