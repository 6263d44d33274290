"""A small copy of this project in a directory of its own, and `dvc repro` in it."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.meta.project import ROOT, project_files

LEFT_OUT = {"tests", "docs", "benchmarks", ".ci"}
TINY_PARAMS: dict[str, dict[str, Any]] = {
    "compute": {"precision": "float32"},
    "sampling": {
        "dtype": "float32",
        "max_new_tokens": 8,
        "max_model_len": 160,
        "kv_cache_gib": 0.1,
        "temperature": 1.0,
    },
    "ingest": {"max_prompt_tokens": 120, "max_pair_tokens": 150},
    "train_rm": {"frozen_layers": 0, "batch_size": 4, "epochs": 1},
    "rollout": {"prompts_per_iteration": 8, "samples_per_prompt": 2, "shard_prompts": 2},
    "ppo_update": {"minibatch_size": 8, "ppo_epochs": 2},
    "evaluate": {"max_prompts": 4, "samples_per_prompt": 1},
}
RESULTS = ("data", "dvc.lock")  # all that a run makes
PROMPTS, EVAL_PROMPTS, PAIRS = 16, 5, 12


@dataclass(frozen=True)
class Repro:
    """What one `dvc repro` did."""

    code: int
    output: str
    ran: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)


def make_project(directory: Path, model: Path) -> Path:
    """Copy the project (without tests and docs), with few rows, a tiny model and one iteration."""
    for path in project_files():
        if path.parts[0] not in LEFT_OUT and path.parts[:1] != ("data",) and path.name != "dvc.lock":
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target)
    write_rows(directory / "data/raw/prompts.jsonl", prompt_rows())
    write_rows(directory / "data/raw/preferences.jsonl", preference_rows(PAIRS))
    change(directory, TINY_PARAMS)
    change(directory, {"base_model": {"source": str(model)}})
    set_iterations(directory, {"1": "0"})
    run(directory, "git", "init", "--quiet")
    run(directory, "git", "add", "--all")
    run(directory, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message", "Start")
    # As tools/setup.py does on a disk without reflinks: what is written in place would then corrupt the cache.
    for name, value in (
        ("core.site_cache_dir", str(directory / ".dvc/tmp/site-cache")),
        ("cache.type", "hardlink,copy"),
    ):
        run(directory, "dvc", "config", "--quiet", "--local", name, value)
    return directory


def prompt_rows() -> list[dict[str, Any]]:
    """Short prompts; the last few are held out."""
    sides = ["train"] * (PROMPTS - EVAL_PROMPTS) + ["eval"] * EVAL_PROMPTS
    return [
        {"prompt": [{"role": "user", "content": f"say {index}"}], "split": side} for index, side in enumerate(sides)
    ]


def preference_rows(count: int) -> list[dict[str, Any]]:
    """Pairs with prompts of their own; every third is held out."""
    return [
        {
            "prompt": [{"role": "user", "content": f"ask {index}"}],
            "chosen": [{"role": "assistant", "content": f"good {index}."}],
            "rejected": [{"role": "assistant", "content": f"bad {index}"}],
            "split": "eval" if index % 3 == 2 else "train",
        }
        for index in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def change(project: Path, values: dict[str, dict[str, Any]]) -> None:
    """Set values in params.yaml, as a person would: all other lines stay."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    path = project / "params.yaml"
    content = yaml.load(path.read_text(encoding="utf-8"))
    for section, keys in values.items():
        for key, value in keys.items():
            assert key in content[section], f"params.yaml has no {section}.{key}"
            content[section][key] = value
    with path.open("w", encoding="utf-8") as handle:
        yaml.dump(content, handle)


def set_iterations(project: Path, previous: dict[str, str]) -> None:
    """Write iterations.yaml from iteration -> the one it starts from, without overrides."""
    sections = "rollout: {}, score: {}, advantages: {}, ppo_update: {}"
    lines = [f'  "{name}": {{prev: "{prev}", {sections}}}\n' for name, prev in previous.items()]
    (project / "iterations.yaml").write_text("iterations:\n" + "".join(lines), encoding="utf-8")


def environment() -> dict[str, str]:
    """This environment with the tests' own Python first on PATH, no network, and no telemetry."""
    venv = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{venv}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "DVC_NO_ANALYTICS": "1",
    }


def run(project: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in the project and return what it printed; a failure shows its output."""
    done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def repro(project: Path, *targets: str, code: int = 0) -> Repro:
    """Run `dvc repro` and sort the stages by what happened to them; fail when it ends with another exit code."""
    done = subprocess.run(
        ["dvc", "repro", *targets],
        cwd=project,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == code, f"dvc repro: exit code {done.returncode}\n{done.stdout[-8000:]}"
    return Repro(
        code=done.returncode,
        output=done.stdout,
        ran=re.findall(r"Running stage '([^']+)'", done.stdout),
        restored=re.findall(r"Stage '([^']+)' is cached - skipping run", done.stdout),
        unchanged=re.findall(r"Stage '([^']+)' didn't change, skipping", done.stdout),
    )


def hashes(project: Path, *folders: str) -> dict[str, str]:
    """sha256 of every file below these folders."""
    files = [path for folder in folders for path in sorted((project / folder).rglob("*")) if path.is_file()]
    return {str(path.relative_to(project)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def processes_in(project: Path) -> list[int]:
    """Numbers of the living processes whose current directory is the project."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if Path(os.readlink(entry / "cwd")) == project.resolve():
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile, is a zombie, or belongs to somebody else
    return found
