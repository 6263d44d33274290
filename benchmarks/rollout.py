"""The rollout stage's sampling loop against bare vLLM on the same requests, and where the stage's other seconds go.

    python -m benchmarks.rollout   # after `dvc repro`, whose base model and prompts it takes; some minutes on 2 cores

Both take turns in one engine: `LLM.generate` with all requests at once, nothing done with what it returns; and the
stage's loop, shard by shard, with its checks, decoding and Parquet files.
"""

import sys

from rlhf_core.sampling.engine import Sampler, prepare_environment

if __name__ == "__main__":
    prepare_environment()  # as the stage does, before anything heavy is imported

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.scratch import scratch_project
from rlhf_core.artifacts.shards import read_table
from rlhf_core.config import load_run
from rlhf_core.errors import RlhfError
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.sampling import rollouts
from stages.rollout import chosen_prompts, described

POLICY = Path("data/checkpoints/policy/0")
NEEDED = ("data/prompts", str(POLICY))
ENGINE, LOOP = "stages.rollout:Sampler", "rlhf_core.sampling.rollouts:sample_shards"


def main() -> None:
    """Measure, print the tables, write the result."""
    arguments = parsed()
    work, out = arguments.work.resolve(), arguments.json and arguments.json.resolve()
    try:
        sizes = {"prompts_per_iteration": arguments.prompts, "samples_per_prompt": arguments.samples}
        changes = {
            "rollout": sizes | {"shard_prompts": arguments.shard_prompts},
            "sampling": {"dtype": arguments.dtype, "max_new_tokens": arguments.max_new_tokens},
        }
        scratch_project(work, arguments.project.resolve(), changes, needed=NEEDED)
        stage = measured_stage(work)
        os.chdir(work)
        result = {**sizes, "dtype": arguments.dtype, "stage": stage, **measured_loop(arguments.repeats)}
    except RlhfError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        os.chdir(measure.ROOT)
        shutil.rmtree(work, ignore_errors=True)
    print(tables(result))
    print(f"\n{measure.written('rollout', result, out)}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--project", type=Path, default=measure.ROOT, help="where `dvc repro` has run")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=2, help="responses to each prompt")
    parser.add_argument("--shard-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", help="sampling.dtype")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, after one that does not")
    parser.add_argument("--work", type=Path, default=measure.RESULTS / "rollout", help="scratch directory")
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args()


def measured_loop(repeats: int) -> dict[str, Any]:
    """Let bare vLLM and the stage's loop sample in turn; seconds are per token, since two draws differ in length."""
    from vllm import SamplingParams

    run = load_run()
    params, metadata = run.at("1"), described(run, "1", POLICY)
    chosen = chosen_prompts(run, "1")
    shards = rollouts.cut(chosen, params.rollout.shard_prompts)
    sampling, n = params.sampling.model_dump(), params.rollout.samples_per_prompt
    own = {name: sampling.pop(name) for name in ("temperature", "max_new_tokens")}
    sampler, tokenizer = Sampler(POLICY, **sampling, seed=params.seed), load_tokenizer(POLICY)
    llm: Any = sampler._llm
    options = {"stop_token_ids": metadata["eos_ids"], "ignore_eos": True, "logprobs": 0, "detokenize": False}
    bare_params = SamplingParams(temperature=own["temperature"], max_tokens=own["max_new_tokens"], **options)
    requests = [{"prompt_token_ids": prompt.prompt_ids} for prompt in chosen for _ in range(n)]

    def bare() -> float:
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate(requests, bare_params, use_tqdm=False)
        return (time.perf_counter() - started) / sum(len(output.outputs[0].token_ids) for output in outputs)

    def loop() -> float:
        with tempfile.TemporaryDirectory() as directory:
            decode: Callable[[list[int]], str] = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
            started = time.perf_counter()
            rollouts.sample_shards(
                sampler, Path(directory), shards, range(len(shards)), decode, iteration="1", seed=1, n=n,
                eos_ids=metadata["eos_ids"], metadata=metadata, **own,
            )  # fmt: skip
            seconds = time.perf_counter() - started
            return seconds / rollouts.rollout_metrics(Path(directory), asked=len(requests))["rollout/tokens"]

    seconds = measure.interleaved({"bare": bare, "loop": loop}, repeats)
    return {
        "shards": len(shards),
        "bare_tokens_per_second": asdict(measure.speed(1, seconds["bare"])),
        "loop_tokens_per_second": asdict(measure.speed(1, seconds["loop"])),
        "speed_of_bare": asdict(measure.ratio(seconds, "bare", "loop")),
    }


def measured_stage(work: Path) -> dict[str, Any]:
    """Run the stage as a process and return its seconds: engine, loop and all else, and the tokens it sampled."""
    times = work / "times.json"
    command = ("benchmarks.timed", str(times), "stages.rollout", "1", "0", "--", ENGINE, LOOP)
    done = measure.child(*command, cwd=work)
    took = measure.read_result(times)
    lengths = [len(row["response_ids"]) for row in read_table(work / "data/rollouts/iteration=1").to_pylist()]
    return {
        "seconds": done.seconds,
        "engine_start": took[ENGINE],
        "loop": took[LOOP],
        "rest": done.seconds - took[ENGINE] - took[LOOP],
        "peak_bytes": done.peak_bytes,
        "tokens": sum(lengths),
    }


def tables(result: dict[str, Any]) -> str:
    """Return the result for people."""
    stage = result["stage"]

    def text(name: str) -> str:
        return measure.Spread(**result[name]).text()

    rows = [
        ["bare vLLM, tokens a second", text("bare_tokens_per_second")],
        [f"sampling loop, {result['shards']} shards, tokens a second", text("loop_tokens_per_second")],
        ["sampling loop, speed of bare vLLM", text("speed_of_bare")],
        ["stage, seconds", f"{stage['seconds']:.1f}"],
        ["of them the engine's start, import of vllm included", f"{stage['engine_start']:.1f}"],
        ["of them the sampling loop", f"{stage['loop']:.1f}"],
        ["of them all else", f"{stage['rest']:.1f}"],
        ["stage, peak memory in GiB", f"{stage['peak_bytes'] / 2**30:.2f}"],
    ]
    title = f"rollout: {result['prompts_per_iteration']} prompts x {result['samples_per_prompt']}, {result['dtype']}"
    return measure.table(title, ["", "median (range)"], rows)


if __name__ == "__main__":
    main()
