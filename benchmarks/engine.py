"""Settings of the sampling engine, each changed alone, against those that this project uses.

    python -m benchmarks.engine   # after `dvc repro`, whose base model and prompts it takes; 20 minutes on 2 cores

Every setting is a process of its own that starts vLLM and samples the same requests. The project's own setting runs
first in every round.
"""

import sys

from rlhf_core.sampling.engine import prepare_environment

if __name__ == "__main__" and sys.argv[1:2] == ["--one"]:
    prepare_environment()

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import measure
from benchmarks.scratch import scratch_project
from rlhf_core.artifacts.shards import read_table
from rlhf_core.errors import RlhfError

POLICY = Path("data/checkpoints/policy/0")
OURS = "as the project has it"
# Name -> environment variables, and options of vllm.LLM, over the project's own.
SETTINGS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    OURS: ({}, {}),
    "no Intel OpenMP preloaded": ({"RLHF_PRELOADED": "1"}, {}),
    "threads not bound to cores": ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, {}),
    "compiled, not eager": ({}, {"enforce_eager": False}),
    "no prefix cache": ({}, {"enable_prefix_caching": False}),
    "64 responses at a time": ({}, {"max_num_seqs": 64}),
    "256 responses at a time": ({}, {"max_num_seqs": 256}),
    "1024 tokens a pass": ({}, {"max_num_batched_tokens": 1024}),
    "8192 tokens a pass": ({}, {"max_num_batched_tokens": 8192}),
    "4 GiB of KV cache": ({}, {"kv_cache_memory_bytes": 4 * 2**30}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
}


def main() -> None:
    """Run all settings in turn, print the table, write the result; or, with --one, be one of them."""
    if sys.argv[1:2] == ["--one"]:
        one(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    arguments = parsed()
    work = arguments.work.resolve()
    try:
        scratch_project(work, arguments.project.resolve(), {}, needed=("data/prompts", str(POLICY)))
        names = [name for name in SETTINGS if name == OURS or not arguments.only or name in arguments.only]
        rounds = [{name: sampled(work, arguments, name) for name in names} for _ in range(arguments.repeats)]
    except RlhfError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result = {name: compared([one[name] for one in rounds], [one[OURS] for one in rounds]) for name in names}
    print(table(result))
    print(f"\n{measure.written('engine', {'settings': result}, arguments.json)}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--project", type=Path, default=measure.ROOT, help="where `dvc repro` has run")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2, help="responses to each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="rounds")
    parser.add_argument("--only", action="append", metavar="NAME", choices=SETTINGS, help="these beside the project's")
    parser.add_argument("--work", type=Path, default=measure.RESULTS / "engine", help="scratch directory")
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args()


def sampled(work: Path, arguments: argparse.Namespace, name: str) -> dict[str, float]:
    """Sample with one setting in a process of its own."""
    variables, options = SETTINGS[name]
    sizes = {key: getattr(arguments, key) for key in ("prompts", "samples", "max_new_tokens")}
    with mock.patch.dict("os.environ", variables):
        measure.child("benchmarks.engine", "--one", json.dumps({**sizes, "options": options}), "one.json", cwd=work)
    found: dict[str, float] = measure.read_result(work / "one.json")
    return found


def one(asked: Mapping[str, Any], out: Path) -> None:
    """Start the engine as the project does, but for the options that are asked for; sample twice, time the second."""
    import vllm

    from rlhf_core.config import load_run
    from rlhf_core.models.tokenizer import eos_ids, load_tokenizer
    from rlhf_core.sampling.engine import Sampler

    original, params = vllm.LLM, load_run().params
    prompts = read_table(Path("data/prompts"), ["prompt_ids"])["prompt_ids"].to_pylist()[: asked["prompts"]]
    started = time.perf_counter()
    with mock.patch.object(vllm, "LLM", lambda **options: original(**options | asked["options"])):
        sampling = params.sampling.model_dump(exclude={"temperature", "max_new_tokens"})
        sampler = Sampler(POLICY, **sampling, seed=0)
    start = time.perf_counter() - started
    ends = eos_ids(POLICY, load_tokenizer(POLICY))
    options: dict[str, Any] = {"n": asked["samples"], "temperature": params.sampling.temperature, "eos_ids": ends}
    for _ in range(2):
        began = time.perf_counter()
        found = sampler.sample(prompts, max_new_tokens=asked["max_new_tokens"], seed=1, **options)
        seconds = time.perf_counter() - began
    tokens = sum(len(sample.response_ids) for own in found for sample in own if sample is not None)
    out.write_text(json.dumps({"start_seconds": start, "tokens_per_second": tokens / seconds}), encoding="utf-8")


def compared(runs: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, Any]:
    """Return the speed of a setting as a multiple of the project's, round by round, and its start."""
    pairs = zip(runs, ours, strict=True)
    return {
        "speed": asdict(measure.spread([run["tokens_per_second"] / own["tokens_per_second"] for run, own in pairs])),
        "tokens_per_second": asdict(measure.spread([run["tokens_per_second"] for run in runs])),
        "start_seconds": asdict(measure.spread([run["start_seconds"] for run in runs])),
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the result for people."""
    head = ["", "speed, times the project's", "tokens a second", "start of the engine, seconds"]
    rows = [
        [name, *(measure.Spread(**own[key]).text() for key in ("speed", "tokens_per_second", "start_seconds"))]
        for name, own in result.items()
    ]
    return measure.table("settings of the engine", head, rows)


if __name__ == "__main__":
    main()
