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

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file

from rlhf_core.artifacts.provenance import hash_tokenizer
from rlhf_core.artifacts.schema import PREFERENCES, advantages_schema
from rlhf_core.artifacts.shards import iter_tables, read_metadata, shard_name, write_shard
from stages import ppo_update, score, train_rm
from tests.distributed_case import CASES, updated
from tests.ppo_case import ALONE
from tests.tiny_run import POLICY, PROMPT, change, stage

ROOT = Path(__file__).parents[2]
# Metrics: float32 logprobs of 15 nats are rounded by 1e-6, differently in a batch of another width, and scores are sums
# over hidden units, of weights that are equal to 1e-6 only.
ROUNDED = {"rel": 2e-5, "abs": 1e-5}


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
    metadata = {"stage": "ingest", "tokenizer": hash_tokenizer(POLICY / "0")}
    write_shard(Path("data/preferences") / shard_name(0), table, PREFERENCES, metadata)


def assert_same_weights(first: dict[str, np.ndarray], second: dict[str, np.ndarray], *, atol: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert np.abs(first[name] - second[name]).max() <= atol, name


def test_two_processes_train_the_reward_model_of_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 10 pairs to train on in batches of 3: 2 and 1 rows a process, and a last batch whose one row only one process has.
    write_preferences(13)
    change("compute", processes=2)
    change("train_rm", frozen_layers=0, batch_size=3, learning_rate=1e-4, epochs=2, warmup_fraction=0.0)
    found = launched("stages.train_rm")
    assert found.returncode == 0, found.stderr
    weights, metrics = Path("data/checkpoints/reward_model/model.safetensors"), Path("data/metrics/train_rm.json")
    two, measured = load_file(weights), json.loads(metrics.read_text())
    change("compute", processes=1)
    train_rm.main()
    one = load_file(weights)
    assert_same_weights(two, one, atol=1e-6)
    before = load_file(POLICY / "0/model.safetensors")
    moved = max(float(np.abs(one[name] - before[name]).max()) for name in before if name in one)
    assert moved > 1e-4  # so that 1e-6 means something
    assert measured == pytest.approx(json.loads(metrics.read_text()), **ROUNDED)


def write_advantages(extreme: str | None = None) -> None:
    """Score the rollouts, and add advantages and returns as drawn; one response may have a return out of range."""
    rng = np.random.default_rng(0)
    for name, table in iter_tables(Path("data/scores/iteration=1")):
        rows = table.to_pylist()
        for row in rows:
            drawn = rng.normal(size=len(row["response_ids"]))
            returns = [3e38] * len(drawn) if row["sample_id"] == extreme else drawn.tolist()
            row |= {"importance_weights": [1.0] * len(drawn), "rewards": drawn.tolist(), "advantages": drawn.tolist()}
            row |= {"returns": returns, "bootstrap_return": None}
        schema = advantages_schema(table.schema)
        metadata = read_metadata(Path("data/scores/iteration=1")) | {"stage": "advantages", "conventions": "ours"}
        write_shard(Path("data/advantages/iteration=1") / name, pa.Table.from_pylist(rows, schema), schema, metadata)


def test_two_processes_update_the_policy_as_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 5 responses with tokens in minibatches of 2, 2 and 1: in the last, one process has no row.
    change("ppo_update", minibatch_size=2, ppo_epochs=2, learning_rate=1e-4, adam_eps=1e-3)
    stage(score, monkeypatch, "1", "0")
    write_advantages()
    found = launched(
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m", "stages.ppo_update", "1", "0"
    )
    assert found.returncode == 0, found.stderr
    results = {
        "policy": POLICY / "1/model.safetensors",
        "head": Path("data/checkpoints/critic/1/value_head.safetensors"),
        "moments": Path("data/checkpoints/optimizer/1/moments.safetensors"),
    }
    metrics = Path("data/metrics/ppo_update/1.json")
    two, measured = {name: load_file(path) for name, path in results.items()}, json.loads(metrics.read_text())
    stage(ppo_update, monkeypatch, "1", "0")
    for name, path in results.items():
        assert_same_weights(two[name], load_file(path), atol=1e-6)
    assert measured == pytest.approx(json.loads(metrics.read_text()), **ROUNDED)
    assert measured["optimizer_steps"] == 6


def test_every_aggregation_and_adapters_give_the_step_of_one_process(tmp_path: Path) -> None:
    found = launched(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.distributed_case", str(tmp_path)
    )
    assert found.returncode == 0, found.stderr
    for case in CASES:
        log, tensors = updated(case, ALONE)
        for rank in (0, 1):
            assert_same_weights(load_file(tmp_path / f"{case}-{rank}.safetensors"), tensors, atol=1e-6)
            theirs = json.loads((tmp_path / f"{case}-{rank}.json").read_text())
            assert theirs == [pytest.approx(step, **ROUNDED) for step in log]


def test_an_error_in_one_process_stops_both_with_one_message(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change("compute", processes=2)
    change("ppo_update", minibatch_size=6)
    stage(score, monkeypatch, "1", "0")
    write_advantages(extreme="1-p1-1")  # which the second process has, with 1-p0-1
    found = launched("stages.ppo_update", "1", "0")
    assert found.returncode == 1
    assert found.stderr.count("NonFiniteStep") == 1 and "Traceback" not in found.stderr
    assert "optimiser step 1, rows 1-p0-1, 1-p1-1: the loss is inf; the step was not taken" in found.stderr
    assert not (POLICY / "1").exists()


def test_no_process_outlives_the_parent_of_the_stage(project: Path) -> None:
    write_preferences(13)
    change("compute", processes=2)
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
