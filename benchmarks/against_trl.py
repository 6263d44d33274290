"""One iteration of this pipeline against one PPO step of TRL, side by side on this machine.

    make parity                       # once: installs TRL into .venv-parity
    python -m benchmarks.against_trl  # after `dvc repro`, whose models and prompts it takes; half an hour on 2 cores

Same models, prompts, number of responses, epochs, optimiser steps and length limit. TRL trains a value model beside the
policy; ours is measured so, too, and with its default, a critic on the policy's trunk. Ours: all stages one after
another as processes of their own, from their start to their end. TRL: PPOTrainer.train() alone, without its start. Its
micro-batch has 16 rows, which padded are about as many tokens as compute.max_batch_tokens.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks import measure
from benchmarks.scratch import NEEDED, scratch_project
from rlhf_core.artifacts.shards import read_table
from rlhf_core.errors import ConfigError, RlhfError

TRL_PYTHON = measure.ROOT / ".venv-parity/bin/python"
ROLLOUTS = Path("data/rollouts/iteration=1")
UPDATE = "stages.ppo_update:update"
# Name of a way to train -> what differs from params.yaml. TRL's two are its dtype.
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "ours, shared critic, bf16-autocast": {"critic": {"kind": "shared"}, "compute": {"precision": "bf16-autocast"}},
    "ours, separate critic, float32": {
        "critic": {"kind": "separate", "init": "policy"},
        "compute": {"precision": "float32"},
    },
}
TRL = {"TRL, float32": "float32", "TRL, bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Took:
    """What one way to train took."""

    seconds: float  # of the iteration or step
    update_seconds: float  # of the update alone, on the same responses for all
    peak_bytes: int  # of the hungriest process
    parts: dict[str, float]  # seconds of each stage, or of TRL's generation


def main() -> None:
    """Run all ways in turn, print the table, write the result."""
    arguments = parsed()
    work = arguments.work.resolve()
    try:
        took = run_all(work, arguments)
    except RlhfError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        if not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)
    tokens = took.pop("tokens")
    print(tables(took, tokens))
    result = {
        "prompts": arguments.prompts,
        "tokens_of_an_epoch": tokens,
        "runs": {name: [vars(one) for one in runs] for name, runs in took.items()},
    }
    print(f"\n{measure.written('against_trl', result, arguments.json)}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_trl", description=__doc__)
    parser.add_argument("--project", type=Path, default=measure.ROOT, help="where `dvc repro` has run")
    parser.add_argument("--prompts", type=int, default=64, help="a multiple of --micro-batch")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows of TRL's; its own default is 8")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--python", type=Path, default=TRL_PYTHON, help="that has TRL")
    parser.add_argument("--work", type=Path, default=measure.RESULTS / "against_trl", help="scratch directory")
    parser.add_argument("--keep", action="store_true", help="leave the scratch directory there")
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args()


def run_all(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every way `repeats` times in turn; "tokens" are those of one epoch, prompts included."""
    if not arguments.python.exists():
        raise ConfigError(f"{arguments.python}: no such file; `make parity` installs TRL")
    projects = {name: work / str(place) for place, name in enumerate(OURS)}
    for name, project in projects.items():
        build(project, arguments, OURS[name])
    first = next(iter(projects.values()))
    took: dict[str, Any] = {name: [] for name in (*OURS, *TRL)}
    for _ in range(arguments.repeats):
        rows: Path | None = None
        for name, project in projects.items():
            took[name].append(told(name, iteration(project)))
            # All updates are on the first one's responses; they are of the same policy, in one precision as sampled.
            rows = rows or responses(first / ROLLOUTS, work / "rows.jsonl")
        assert rows is not None
        for name, dtype in TRL.items():
            took[name].append(told(name, trl_step(first, rows, dtype, arguments)))
    lengths = [len(row["prompt_ids"]) + len(row["response_ids"]) for row in read_rows(work / "rows.jsonl")]
    return took | {"tokens": sum(lengths)}


def told(name: str, took: Took) -> Took:
    """Say what one way took, since all of them take long."""
    parts = ", ".join(f"{part} {seconds:.0f}" for part, seconds in took.parts.items())
    print(f"{name}: {took.seconds:.0f} s ({parts}), {took.peak_bytes / 2**30:.1f} GiB", flush=True)
    return took


def build(project: Path, arguments: argparse.Namespace, changes: dict[str, dict[str, Any]]) -> None:
    """Write a scratch project that begins where `dvc repro` has trained the reward model."""
    own: dict[str, dict[str, Any]] = {
        "sampling": {"max_new_tokens": arguments.max_new_tokens},
        "rollout": {"prompts_per_iteration": arguments.prompts, "samples_per_prompt": 1},
        "ppo_update": {"ppo_epochs": arguments.epochs, "minibatch_size": arguments.prompts},
    }
    needed = tuple(name for name in NEEDED if "critic" not in name)
    scratch_project(project, arguments.project, own | changes, needed=needed)
    measure.child("stages.init_critic", cwd=project)


def iteration(project: Path) -> Took:
    """Run one iteration's stages, each from its start."""
    for name in ("data/rollouts", "data/scores", "data/advantages", "data/checkpoints/policy/1", ".work"):
        shutil.rmtree(project / name, ignore_errors=True)
    times = project / "times.json"
    commands = {
        "rollout": ["stages.rollout", "1", "0"],
        "score": ["stages.score", "1", "0"],
        "advantages": ["stages.advantages", "1", "0"],
        "ppo_update": ["benchmarks.timed", str(times), "stages.ppo_update", "1", "0", "--", UPDATE],
    }
    ran = {name: measure.child(*command, cwd=project) for name, command in commands.items()}
    return Took(
        sum(one.seconds for one in ran.values()),
        measure.read_result(times)[UPDATE],
        max(one.peak_bytes for one in ran.values()),
        {name: one.seconds for name, one in ran.items()},
    )


def responses(rollouts: Path, path: Path) -> Path:
    """Write the sampled responses where TRL's process can read them."""
    rows = read_table(rollouts, ["prompt_ids", "response_ids"]).to_pylist()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, list[int]]]:
    """Read what `responses` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def trl_step(project: Path, rows: Path, dtype: str, arguments: argparse.Namespace) -> Took:
    """Run TRL's step in a process of its own."""
    temperature = YAML(typ="safe").load(project / "params.yaml")["sampling"]["temperature"]
    out = project / "trl.json"
    command = [str(arguments.python), "-m", "benchmarks.trl_step", "--dtype", dtype, "--rows", str(rows)]
    command += ["--policy", "data/checkpoints/policy/0", "--reward-model", "data/checkpoints/reward_model"]
    command += ["--micro-batch", str(arguments.micro_batch)]
    command += ["--max-new-tokens", str(arguments.max_new_tokens), "--epochs", str(arguments.epochs)]
    command += ["--temperature", str(temperature), "--out", str(out)]
    done = subprocess.run(command, cwd=project, env={**os.environ, "PYTHONPATH": str(measure.ROOT)}, check=False)
    if done.returncode:
        raise RlhfError(f"{' '.join(command)} failed; its message is above")
    took = measure.read_result(out)
    parts = {"generation": took["generation_seconds"], "update": took["update_seconds"]}
    return Took(took["step_seconds"], took["update_seconds"], took["peak_bytes"], parts)


def tables(took: dict[str, list[Took]], tokens: int) -> str:
    """Return the comparison for people: every ratio is taken within a round."""
    rows = []
    for name, runs in took.items():
        row = [name, measure.spread([one.seconds for one in runs]).text()]
        row += [f"{max(one.peak_bytes for one in runs) / 2**30:.1f}"]
        row += [measure.spread([tokens / one.update_seconds for one in runs]).text()]
        for other in TRL:
            pairs = list(zip(runs, took[other], strict=True))
            row.append(measure.spread([own.seconds / trl.seconds for own, trl in pairs]).text(2))
            row.append(measure.spread([trl.update_seconds / own.update_seconds for own, trl in pairs]).text(2))
        rows.append(row)
    head = ["", "seconds", "peak GiB", "update, tokens of an epoch a second"]
    for other in TRL:
        head += [f"time / {other}", f"update's speed / {other}"]
    return measure.table("one iteration against one step of TRL", head, rows)


if __name__ == "__main__":
    main()
