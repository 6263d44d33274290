"""A scratch project for a benchmark: parameters of its own, and the models and prompts of a run that is there."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks import measure
from rlhf_core.errors import ConfigError

# What an iteration needs of the run before it.
NEEDED = (
    "data/prompts",
    "data/checkpoints/policy/0",
    "data/checkpoints/optimizer/0",
    "data/checkpoints/critic/0",
    "data/checkpoints/reward_model",
    "data/reward_state/0.json",
)
ENTRY = 'iterations: {"1": {prev: "0", rollout: {}, score: {}, advantages: {}, ppo_update: {}}}\n'


def scratch_project(
    work: Path, source: Path, changes: Mapping[str, Mapping[str, Any]], *, needed: tuple[str, ...] = NEEDED
) -> None:
    """Write a project that is about to run its first iteration; links stand for what it reads.

    Args:
        work: Where; removed first.
        source: A project in which `dvc repro` has run.
        changes: Group -> key -> value, over params.yaml.
        needed: Paths in the source.

    Raises:
        ConfigError: If the source lacks one of them.
    """
    shutil.rmtree(work, ignore_errors=True)
    for name in needed:
        path = source / name
        if not path.exists():
            raise ConfigError(f"{path}: no such file; run `make demo` first, or name a project with --project")
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).symlink_to(path.resolve())
    yaml = YAML()
    params = yaml.load(measure.ROOT / "params.yaml")
    for group, values in changes.items():
        params[group].update(values)
    yaml.dump(params, work / "params.yaml")
    (work / "iterations.yaml").write_text(ENTRY, encoding="utf-8")
