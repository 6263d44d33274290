"""Prompts and preferences in our schema, tokenised with the policy's tokenizer: `python -m stages.ingest`."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_core.artifacts.provenance import hash_tokenizer
from rlhf_core.artifacts.schema import PREFERENCES, PROMPTS
from rlhf_core.artifacts.shards import shard_name, write_shard
from rlhf_core.config import load_run
from rlhf_core.ingest.formats import read_rows, source_hash
from rlhf_core.ingest.preferences import preferences_table
from rlhf_core.ingest.prompts import prompts_table
from rlhf_core.ingest.rules import PAIR_RULES, PROMPT_RULES, Drops, ingest_metrics, require_both_sides
from rlhf_core.ingest.shapes import prompt_of
from rlhf_core.models.tokenizer import eos_ids, load_tokenizer
from rlhf_core.stage import publish, run_stage, work_directory, write_json

POLICY = Path("data/checkpoints/policy/0")
ROWS_PER_SHARD = 50_000


def main() -> None:
    """Read both sources, write both artifacts and the counts."""
    run, tokenizer = load_run().params, load_tokenizer(POLICY)
    p = run.ingest
    metadata = {"stage": "ingest", "tokenizer": hash_tokenizer(POLICY)}
    names = ("special_tokens_in_text", "eval_fraction", "fraction")
    shared: dict[str, Any] = {"seed": run.seed, **{name: getattr(p, name) for name in names}}

    rows, dropped, limit = list(read_rows(p.prompts)), Drops("prompts", PROMPT_RULES), p.max_prompt_tokens
    shared["drops"] = dropped
    read = partial(prompt_of, **p.model_dump(include={"prompt_key", "prompt_template", "ground_truth_key"}))
    prompts, sides = prompts_table(rows, tokenizer, read=read, max_prompt_tokens=limit, too_long=p.too_long, **shared)
    require_both_sides(prompts, dropped, source=p.prompts)
    prompts_hash = source_hash(p.prompts, rows)

    pairs, dropped_pairs, inputs = PREFERENCES.empty_table(), Drops("pairs", PAIR_RULES), {}
    if p.preferences is not None:
        rows, eos_id = list(read_rows(p.preferences)), tokenizer.eos_token_id or eos_ids(POLICY, tokenizer)[0]
        shared |= {"drops": dropped_pairs, "max_pair_tokens": p.max_pair_tokens, "other_sides": sides}
        pairs = preferences_table(rows, tokenizer, eos_id=eos_id, **shared)
        require_both_sides(pairs, dropped_pairs, source=p.preferences)
        inputs = {p.preferences: source_hash(p.preferences, rows)}
        if dropped_pairs.counts()["prompt_on_other_side"]:  # only then do the pairs depend on the prompts
            inputs[p.prompts] = prompts_hash

    work = work_directory("ingest", {"params": p.model_dump(), "prompts": prompts_hash, "pairs": inputs, **metadata})
    write(prompts, PROMPTS, work / "prompts", {**metadata, "inputs": {p.prompts: prompts_hash}})
    write(pairs, PREFERENCES, work / "preferences", {**metadata, "inputs": inputs})
    for name in ("prompts", "preferences"):
        publish(work / name, Path("data") / name)
    write_json(Path("data/metrics/ingest.json"), ingest_metrics(prompts, dropped, pairs, dropped_pairs))


def write(table: pa.Table, schema: pa.Schema, directory: Path, metadata: dict[str, Any]) -> None:
    """Write a table as shards, one without rows when it has none, in place of what an interrupted run left."""
    shutil.rmtree(directory, ignore_errors=True)
    for index, start in enumerate(range(0, max(table.num_rows, 1), ROWS_PER_SHARD)):
        write_shard(directory / shard_name(index), table.slice(start, ROWS_PER_SHARD), schema, metadata)


if __name__ == "__main__":
    run_stage("ingest", main)
