"""The advantages stage: its kernel, and the whole from Parquet to Parquet, in tokens per second and memory.

    python -m benchmarks.advantages                        # a minute
    python -m benchmarks.advantages --responses 1000000    # 2e8 tokens: 20 GB of disk and some minutes

The kernel takes turns with a copy of the arrays that it reads; the stage, a process of its own, with another one that
reads the same shards and writes them with the same new columns by pyarrow alone.
"""

import argparse
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from ruamel.yaml import YAML

from benchmarks import measure
from rlhf_core.algorithms.advantages import gae
from rlhf_core.algorithms.ragged import Offsets, PerToken
from rlhf_core.artifacts.schema import scores_schema
from rlhf_core.artifacts.shards import ragged_array, shard_name, write_shard
from rlhf_core.stage import write_json
from stages.advantages import BLOCK

SCORES, OUT = Path("data/scores/iteration=1"), Path("data/advantages/iteration=1")
KERNEL_TOKENS = 50_000_000
PROMPT_TOKENS = 40
SAMPLES = 4  # responses to one prompt
LETTERS = 4  # of text for each token
ENTRY = 'iterations: {"1": {prev: "0", rollout: {}, score: {}, advantages: {}, ppo_update: {}}}\n'
STATE = {"kl_coef": None, "scores": {"count": 0, "mean": 0.0, "m2": 0.0}}
# A vocabulary for the text, so that it compresses about as text does.
WORDS = "the of and a to in is you that it he was for on are as with his they at be this have from or one had by word"


def main() -> None:
    """Measure, print the tables, write the result."""
    arguments = parsed()
    work = arguments.work.resolve()
    kernel = measured_kernel(arguments.kernel_tokens, arguments.repeats)
    tokens = scratch_project(work, arguments)
    try:
        stage = measured_stage(work, tokens, arguments.repeats)
    finally:
        if not arguments.keep:
            shutil.rmtree(work)
    result = {"kernel": kernel, "stage": {"responses": arguments.responses, "tokens": tokens, **stage}}
    print(tables(result))
    print(f"\n{measure.written('advantages', result, arguments.json)}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advantages", description=__doc__)
    parser.add_argument("--responses", type=int, default=50_000)
    parser.add_argument("--mean-length", type=int, default=200, help="tokens of a response")
    parser.add_argument("--shard-responses", type=int, default=8192)
    parser.add_argument("--kernel-tokens", type=int, default=KERNEL_TOKENS)
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, after one that does not")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of advantages in params.yaml")
    parser.add_argument("--work", type=Path, default=measure.RESULTS / "advantages", help="scratch directory")
    parser.add_argument("--keep", action="store_true", help="leave the scratch directory there")
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args()


def measured_kernel(tokens: int, repeats: int) -> dict[str, Any]:
    """Time GAE in blocks as the stage calls it, against copies of what a block reads and writes, on one core."""
    generator = np.random.default_rng(0)
    offsets = row_offsets(generator, rows=BLOCK // 200, mean_length=200)
    rewards, values, spare = (generator.standard_normal(offsets[-1]) for _ in range(3))
    blocks = max(tokens // int(offsets[-1]), 1)

    def kernel() -> None:
        for _ in range(blocks):
            gae(rewards, values, offsets, gamma=1.0, gae_lambda=0.95)

    def copies() -> None:
        for _ in range(blocks):
            for source in (rewards, values, rewards):
                np.copyto(spare, source)

    seconds = measure.interleaved({"gae": kernel, "copies": copies}, repeats)
    done = blocks * int(offsets[-1])
    return {
        "tokens": done,
        "tokens_per_second": asdict(measure.speed(done, seconds["gae"])),
        "speed_of_copies": asdict(measure.ratio(seconds, "copies", "gae")),
    }


def row_offsets(generator: np.random.Generator, *, rows: int, mean_length: int) -> Offsets:
    """Return the offsets of rows with 1 to twice the mean length of tokens, less one."""
    lengths = generator.integers(1, 2 * mean_length, size=rows)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def scratch_project(work: Path, arguments: argparse.Namespace) -> int:
    """Write parameters, the first reward state and made-up scores in shards; return the response tokens."""
    if work.exists():
        shutil.rmtree(work)
    yaml = YAML()
    params = yaml.load(measure.ROOT / "params.yaml")
    for change in arguments.set:
        key, _, value = change.partition("=")
        params["advantages"][key] = YAML(typ="safe").load(value)
    write_json(work / "data/reward_state/0.json", STATE)
    yaml.dump(params, work / "params.yaml")
    (work / "iterations.yaml").write_text(ENTRY, encoding="utf-8")
    words = WORDS.split()
    text = " ".join(np.random.default_rng(0).choice(words, 4096 * arguments.mean_length // 200 + 4096))
    tokens = 0
    for index, first in enumerate(range(0, arguments.responses, arguments.shard_responses)):
        rows = min(arguments.shard_responses, arguments.responses - first)
        table = scores(first, rows, arguments.mean_length, text)
        write_shard(work / SCORES / shard_name(index), table, scores_schema(["reward_model"]), metadata())
        tokens += int(pa.compute.sum(pa.compute.list_value_length(table["logprobs"])).as_py())
    return tokens


def metadata() -> dict[str, Any]:
    """Return what the stage reads of the scores' metadata, and a stand-in for the rest."""
    return {"stage": "score", "iteration": "1", "inputs": {}, "sampling": {"max_new_tokens": 2**20}}


def scores(first: int, rows: int, mean_length: int, text: str) -> pa.Table:
    """Return one shard of made-up scores: random numbers, and text of the right length."""
    generator = np.random.default_rng(first)
    offsets = row_offsets(generator, rows=rows, mean_length=mean_length)
    tokens, numbers = int(offsets[-1]), range(first, first + rows)

    def per_token(values: PerToken) -> pa.Array:
        return ragged_array(values.astype(np.float32), offsets, pa.float32())

    sampler = -generator.exponential(1.0, tokens)
    logprobs = sampler + 0.01 * generator.standard_normal(tokens)
    ids = generator.integers(0, 49152, tokens, dtype=np.int32)
    starts = generator.integers(0, len(text) // 2, rows)
    ends = starts + LETTERS * np.diff(offsets)
    prompts = [f"p{number // SAMPLES}" for number in numbers]
    prompt_ids = generator.integers(0, 49152, PROMPT_TOKENS * rows, dtype=np.int32)
    score = generator.standard_normal(rows)
    columns = {
        "sample_id": [f"1-{prompt}-{number % SAMPLES}" for prompt, number in zip(prompts, numbers, strict=True)],
        "prompt_id": prompts,
        "sample_index": [number % SAMPLES for number in numbers],
        "prompt": [f"Tell me what {prompt} is in one sentence." for prompt in prompts],
        "prompt_ids": ragged_array(prompt_ids, np.arange(rows + 1) * PROMPT_TOKENS, pa.int32()),
        "response": [text[start:end] for start, end in zip(starts, ends, strict=True)],
        "response_ids": ragged_array(ids, offsets, pa.int32()),
        "sampler_logprobs": per_token(sampler),
        "finish_reason": np.where(generator.random(rows) < 0.9, "stop", "length"),
        "ground_truth": pa.nulls(rows, pa.string()),
        "logprobs": per_token(logprobs),
        "ref_logprobs": per_token(logprobs + 0.1 * generator.standard_normal(tokens)),
        "values": per_token(generator.standard_normal(tokens)),
        "bootstrap_value": generator.standard_normal(rows),
        "score_reward_model": score,
        "score": score,
    }
    return pa.table(columns)


def measured_stage(work: Path, tokens: int, repeats: int) -> dict[str, Any]:
    """Run stage and bare reading and writing in turn, and a stage over nothing once for what starting costs."""
    peaks: dict[str, list[int]] = {"stage": [], "bare": []}

    def run(name: str, *command: str) -> float:
        os.sync()  # what the other one wrote: only the stage syncs its files, and would wait for both
        done = measure.child(*command, cwd=work)
        peaks[name].append(done.peak_bytes)
        return done.seconds

    contenders: dict[str, Callable[[], float]] = {
        "stage": lambda: run("stage", "stages.advantages", "1", "0"),
        "bare": lambda: run("bare", "benchmarks.bare_parquet", str(SCORES), "data/bare"),
    }
    seconds = measure.interleaved(contenders, repeats)
    return {
        "seconds": asdict(measure.spread(seconds["stage"])),
        "tokens_per_second": asdict(measure.speed(tokens, seconds["stage"])),
        "speed_of_bare_parquet": asdict(measure.ratio(seconds, "bare", "stage")),
        "peak_bytes": max(peaks["stage"]),
        "peak_bytes_of_bare_parquet": max(peaks["bare"]),
    }


def tables(result: dict[str, Any]) -> str:
    """Return the result for people."""
    kernel, stage = result["kernel"], result["stage"]

    def text(x: dict[str, float], scale: float = 1.0) -> str:
        return measure.Spread(*(x[name] / scale for name in ("median", "low", "high"))).text()

    rows = [
        ["GAE, million tokens a second on one core", text(kernel["tokens_per_second"], 1e6)],
        ["GAE, speed of copying what it reads and writes", text(kernel["speed_of_copies"])],
        ["stage, million tokens a second, its start included", text(stage["tokens_per_second"], 1e6)],
        ["stage, speed of reading and writing by pyarrow alone", text(stage["speed_of_bare_parquet"])],
        ["stage, seconds", text(stage["seconds"])],
        ["stage, peak memory in MiB", f"{stage['peak_bytes'] / 2**20:.0f}"],
        ["reading and writing alone, peak memory in MiB", f"{stage['peak_bytes_of_bare_parquet'] / 2**20:.0f}"],
    ]
    title = f"advantages: {stage['responses']} responses, {stage['tokens']:.3g} tokens"
    return measure.table(title, ["", "median (range)"], rows)


if __name__ == "__main__":
    main()
