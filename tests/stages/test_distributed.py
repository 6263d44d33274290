"""Two processes train as one does: train_rm and ppo_update with compute.processes: 2 against the same stage alone.

Mutations that must fail here: gradients averaged instead of added; each process's loss divided by its own rows; a
process without rows left out of the exchange; the error of one process not told to the others; prctl left out.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import load_file

from rlhf_core.artifacts.provenance import hash_tokenizer
from rlhf_core.artifacts.schema import PREFERENCES
from rlhf_core.artifacts.shards import shard_name, write_shard
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
PROMPT = [1, 3, 89, 70, 4, 3, 69]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with parameters for two processes, and a base model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "iterations.yaml").write_text((ROOT / "iterations.yaml").read_text())
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    for name in ("prompts", "preferences"):
        path = tmp_path / f"data/raw/{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    change("compute", device="cpu", precision="float32", max_batch_tokens=40, processes=2)
    save_tiny(tmp_path / "data/checkpoints/policy/0")
    return tmp_path


def change(section: str, **values: Any) -> None:
    yaml = YAML()
    params = yaml.load(Path("params.yaml").read_text())
    params[section] |= values
    yaml.dump(params, Path("params.yaml"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launched(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a stage as dvc does: a command line, and nothing else."""
    return subprocess.run(
        [sys.executable, "-m", *command], env=environment(), capture_output=True, text=True, timeout=120
    )


def write_preferences(pairs: int) -> None:
    """Pairs of different lengths; every fourth is held out."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "pair_id": f"q{index}",
            "messages": None,
            "prompt": "p",
            "prompt_ids": PROMPT,
            "responses": ["a", "b"],
            "response_ids": [[first, *rng.integers(70, 89, rng.integers(1, 9)).tolist(), 2] for first in (90, 91)],
            "ranks": [0, 1],
            "margin": None,
            "source": "made",
            "split": "eval" if index % 4 == 3 else "train",
        }
        for index in range(pairs)
    ]
    table = pa.Table.from_pylist(rows, schema=PREFERENCES)
    metadata = {"stage": "ingest", "tokenizer": hash_tokenizer(Path("data/checkpoints/policy/0"))}
    write_shard(Path("data/preferences") / shard_name(0), table, PREFERENCES, metadata)


def assert_same_weights(first: dict[str, np.ndarray], second: dict[str, np.ndarray], *, atol: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert np.abs(first[name] - second[name]).max() <= atol, name


def test_two_processes_train_the_reward_model_of_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages import train_rm

    # 10 pairs to train on in batches of 3: 2 and 1 rows a process, and a last batch whose one row only one process has.
    write_preferences(13)
    change("train_rm", frozen_layers=0, batch_size=3, learning_rate=1e-4, epochs=2, warmup_fraction=0.0)
    found = launched("stages.train_rm")
    assert found.returncode == 0, found.stderr
    weights, metrics = Path("data/checkpoints/reward_model/model.safetensors"), Path("data/metrics/train_rm.json")
    two, measured = load_file(weights), json.loads(metrics.read_text())
    change("compute", processes=1)
    train_rm.main()
    one = load_file(weights)
    assert_same_weights(two, one, atol=1e-6)
    before = load_file("data/checkpoints/policy/0/model.safetensors")
    moved = max(float(np.abs(one[name] - before[name]).max()) for name in before if name in one)
    assert moved > 1e-4  # so that 1e-6 means something
    assert measured == pytest.approx(json.loads(metrics.read_text()), abs=1e-6)


def test_no_process_outlives_the_parent_of_the_stage(project: Path) -> None:
    write_preferences(13)
    change("train_rm", frozen_layers=0, batch_size=3, learning_rate=1e-6, epochs=100_000)
    starts = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-m', 'stages.train_rm'])"
    parent = subprocess.Popen([sys.executable, "-c", starts], env=environment(), stderr=subprocess.PIPE, text=True)
    assert parent.stderr is not None
    while "loss=" not in (shown := parent.stderr.read(1000)):  # the progress bar of a step
        assert shown, "the stage ended by itself"
    family = descendants(parent.pid)
    assert len(family) == 3  # the launcher, which replaced the stage, and its two processes
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while any(alive(process) for process in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(process) for process in family)


def descendants(process: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
