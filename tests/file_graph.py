"""A small DVC project with the paths and shape of ours, whose stages use our writers and no model: real `dvc repro` in
seconds.

Run by dvc as `python -m tests.file_graph STAGE ITERATION PREV` in the project's directory.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.numpy import save_file

from rlhf_core.artifacts.lineage import write_lineage
from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import PROMPTS, ROLLOUTS
from rlhf_core.artifacts.shards import iter_tables, shard_name, write_shard
from rlhf_core.stage import publish, run_stage, work_directory, write_json

ROOT = Path(__file__).parents[1]
DVC_YAML = """\
vars: [iterations.yaml]
stages:
  base_model:
    cmd: exec {python} -m tests.file_graph base_model 0 0
    outs: [data/checkpoints/policy/0, data/checkpoints/critic/0, data/checkpoints/optimizer/0]
  ingest:
    cmd: exec {python} -m tests.file_graph ingest 0 0
    deps: [data/raw/prompts.jsonl]
    outs: [data/prompts]
  rollout:
    foreach: ${{iterations}}
    do:
      cmd: exec {python} -m tests.file_graph rollout ${{key}} ${{item.prev}}
      deps: [data/prompts, "data/checkpoints/policy/${{item.prev}}"]
      outs: ["data/rollouts/iteration=${{key}}"]
  advantages:
    foreach: ${{iterations}}
    do:
      cmd: exec {python} -m tests.file_graph advantages ${{key}} ${{item.prev}}
      deps: ["data/rollouts/iteration=${{key}}"]
      outs: ["data/advantages/iteration=${{key}}"]
  ppo_update:
    foreach: ${{iterations}}
    do:
      cmd: exec {python} -m tests.file_graph ppo_update ${{key}} ${{item.prev}}
      deps:
        - data/advantages/iteration=${{key}}
        - data/checkpoints/policy/${{item.prev}}
        - data/checkpoints/critic/${{item.prev}}
        - data/checkpoints/optimizer/${{item.prev}}
      outs:
        - data/checkpoints/policy/${{key}}
        - data/checkpoints/critic/${{key}}
        - data/checkpoints/optimizer/${{key}}
"""


def make(directory: Path, iterations: int = 2) -> Path:
    """Write the project, with outs linked to the cache as on a disk without reflinks; nothing has run yet."""
    (directory / "data/raw").mkdir(parents=True)
    (directory / "data/raw/prompts.jsonl").write_text('{"prompt": "a"}\n')
    (directory / "dvc.yaml").write_text(DVC_YAML.format(python=sys.executable))
    (directory / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    set_iterations(directory, iterations)
    dvc(directory, "init", "--no-scm", "--quiet")
    core = "[core]\nno_scm = True\nanalytics = false\ncheck_update = false\nsite_cache_dir = tmp/site\n"
    (directory / ".dvc/config").write_text(core + "[cache]\ntype = hardlink,copy\n")
    return directory


def set_iterations(directory: Path, count: int) -> None:
    """Write iterations.yaml: a chain of so many."""
    sections = "rollout: {}, score: {}, advantages: {}, ppo_update: {}"
    lines = [f'  "{number}": {{prev: "{number - 1}", {sections}}}\n' for number in range(1, count + 1)]
    (directory / "iterations.yaml").write_text("iterations:\n" + "".join(lines))


def environment() -> dict[str, str]:
    """This environment, in which the project's modules are found."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "DVC_NO_ANALYTICS": "1"}


def dvc(directory: Path, *arguments: str, code: int = 0) -> str:
    """Run dvc in a project and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def stage(name: str, iteration: str, prev: str) -> None:
    """Run one stage's work."""
    prompts, own = Path("data/prompts"), f"iteration={iteration}"
    before = [Path("data/checkpoints") / kind / prev for kind in ("policy", "critic", "optimizer")]
    work = work_directory(f"{name}@{iteration}", {})
    time.sleep(float(os.environ.get("FILE_GRAPH_SLEEP", "0")))
    if name in ("base_model", "ppo_update"):
        advantages = Path("data/advantages") / own
        inputs = {str(path): hash_path(path) for path in [advantages, *before]} if name == "ppo_update" else {}
        for path in before:
            weights = np.full(64, float(iteration) + len(str(path)), np.float32)
            (work / path.parent.name).mkdir(exist_ok=True)
            save_file({"w": weights, "same": np.ones(4096, np.float32)}, work / path.parent.name / "model.safetensors")
            write_json(work / path.parent.name / "config.json", {"kind": path.parent.name})
            write_lineage(work / path.parent.name, stage=name, iteration=iteration, inputs=inputs)
        for path in before:
            publish(work / path.parent.name, path.parent / iteration)
    elif name == "ingest":
        source = Path("data/raw/prompts.jsonl")
        row = {"prompt_id": "p", "prompt": "a", "prompt_ids": [1], "source": "s", "split": "train"}
        table = pa.Table.from_pylist([row], schema=PROMPTS)
        write_shard(work / shard_name(0), table, PROMPTS, {"inputs": {str(source): hash_path(source)}})
        publish(work, prompts)
    elif name == "rollout":
        described = {"inputs": {str(path): hash_path(path) for path in (prompts, before[0])}}
        write_shard(work / shard_name(0), rows(iteration), ROLLOUTS, described)
        publish(work, Path("data/rollouts") / own)
    else:
        rollouts = Path("data/rollouts") / own
        described = {"inputs": {str(rollouts): hash_path(rollouts)}}
        for shard, table in iter_tables(rollouts):
            write_shard(work / shard, table, ROLLOUTS, described)
        publish(work, Path("data/advantages") / own)


def rows(iteration: str) -> pa.Table:
    """One response."""
    row: dict[str, Any] = {
        "sample_id": f"{iteration}-p-0",
        "prompt_id": "p",
        "sample_index": 0,
        "prompt": "a",
        "prompt_ids": [1],
        "response": "b" * 40,
        "response_ids": [2, 3],
        "sampler_logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
    }
    return pa.Table.from_pylist([row], schema=ROLLOUTS)


if __name__ == "__main__":
    run_stage(f"{sys.argv[1]}@{sys.argv[2]}", lambda: stage(*sys.argv[1:]))
