"""The whole graph on a tiny random model, through real `dvc repro` and real vLLM: what runs, what does not, and that an
interrupted run ends like an uninterrupted one.

The tests are steps of one story in one copy of the project: each starts where the one before ended.
"""

import hashlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pipeline.project import (
    PAIRS,
    RESULTS,
    Repro,
    change,
    environment,
    hashes,
    make_project,
    preference_rows,
    processes_in,
    repro,
    run,
    set_iterations,
    write_rows,
)

pytestmark = pytest.mark.vllm

ONCE = ["validate", "base_model", "ingest", "train_rm", "init_critic", "evaluate_base", "report"]
PER_ITERATION = ["rollout", "score", "advantages", "ppo_update", "evaluate"]


def of_iteration(name: str) -> list[str]:
    return [f"{stage}@{name}" for stage in PER_ITERATION]


def test_first_run_runs_every_stage_once(first: tuple[Repro, dict[str, str]], project: Path) -> None:
    assert sorted(first[0].ran) == sorted([*ONCE, *of_iteration("1")])
    assert first[0].restored == []


def test_status_is_clean_after_it(first: tuple[Repro, dict[str, str]], project: Path) -> None:
    assert "up to date" in run(project, "dvc", "status").stdout


def test_a_replay_of_the_iteration_gives_the_same_bytes(first: tuple[Repro, dict[str, str]], project: Path) -> None:
    before = hashes(project, "data")
    stages = "rollout,ppo_update"  # those with a random choice in them; evaluate samples as rollout does
    told = run(project, sys.executable, "-m", "rlhf_core.cli", "replay", "1", "--stages", stages).stdout
    assert told.count("the same bytes") == 2
    assert "environment" not in told  # recorded by the first run, and still the same
    assert hashes(project, "data") == before


def test_second_run_runs_nothing(first: tuple[Repro, dict[str, str]], project: Path) -> None:
    again = repro(project)
    assert (again.ran, again.restored) == ([], [])
    assert sorted(again.unchanged) == sorted(first[0].ran)


def test_checkpoints_are_on_disk_once(first: tuple[Repro, dict[str, str]], project: Path) -> None:
    assert (project / "data/checkpoints/policy/1/model.safetensors").stat().st_nlink == 2  # here and in DVC's cache


def test_git_sees_metrics_and_the_lock_but_no_artifacts(first: tuple[Repro, dict[str, str]], project: Path) -> None:
    lines = run(project, "git", "status", "--porcelain", "--untracked-files=all").stdout.splitlines()
    new = {line[3:] for line in lines}
    allowed = ("data/metrics/", "data/plots/", "dvc.lock")
    assert {path for path in new if not path.startswith(allowed)} == set()
    assert "data/metrics/summary.json" in new


def test_metrics_are_shown(first: tuple[Repro, dict[str, str]], project: Path) -> None:
    shown = run(project, "dvc", "metrics", "show").stdout
    for name in ("objective/kl", "policy/clipfrac_avg", "eval/score_mean", "eval/accuracy"):
        assert name in shown


def test_another_lambda_reruns_advantages_and_what_follows(project: Path, first: tuple[Repro, dict[str, str]]) -> None:
    change(project, {"advantages": {"gae_lambda": 0.5}})
    again = repro(project)
    assert again.ran == ["validate", "advantages@1", "ppo_update@1", "evaluate@1", "report"]
    assert hashes(project, "data/advantages") != {k: v for k, v in first[1].items() if k.startswith("data/advantages/")}


def test_taking_it_back_restores_everything_from_the_cache(project: Path, first: tuple[Repro, dict[str, str]]) -> None:
    change(project, {"advantages": {"gae_lambda": 0.95}})
    again = repro(project)
    assert again.ran == []
    assert again.restored == ["validate", "advantages@1", "ppo_update@1", "evaluate@1", "report"]
    assert hashes(project, "data") == {k: v for k, v in first[1].items() if k.startswith("data/")}


def test_bad_value_stops_before_anything_is_removed(project: Path, first: tuple[Repro, dict[str, str]]) -> None:
    change(project, {"advantages": {"gae_lambda": 1.5}})
    stopped = repro(project, code=255)
    assert stopped.ran == ["validate"]
    assert "params.yaml: advantages.gae_lambda is 1.5" in stopped.output
    assert "Traceback" not in stopped.output
    assert "exited with 1" in stopped.output
    checks = {k: v for k, v in first[1].items() if k.startswith("data/") and not k.startswith("data/.checks/")}
    assert {k: v for k, v in hashes(project, "data").items() if not k.startswith("data/.checks/")} == checks
    change(project, {"advantages": {"gae_lambda": 0.95}})
    assert repro(project).ran == []


def test_other_preferences_rerun_the_reward_model_but_not_the_rollouts(project: Path) -> None:
    # Up to the scores; what follows from other scores is the same as for another lambda.
    before = hashes(project, "data")
    write_rows(project / "data/raw/preferences.jsonl", preference_rows(PAIRS + 3))
    again = repro(project, "score@1")
    assert sorted(again.ran) == ["ingest", "init_critic", "score@1", "train_rm"]
    assert "rollout@1" in again.unchanged
    write_rows(project / "data/raw/preferences.jsonl", preference_rows(PAIRS))
    back = repro(project)
    assert back.ran == []
    assert sorted(back.restored) == ["ingest", "init_critic", "score@1", "train_rm"]
    assert hashes(project, "data") == before


def test_another_iteration_runs_alone(project: Path, first: tuple[Repro, dict[str, str]]) -> None:
    before = hashes(project, "data")
    set_iterations(project, {"1": "0", "2": "1"})
    again = repro(project)
    assert sorted(again.ran) == sorted(["validate", *of_iteration("2"), "report"])
    after = hashes(project, "data")
    kept = [
        path
        for path in before
        if not path.startswith(("data/report/", "data/metrics/summary", "data/plots/iterations"))
    ]
    assert [path for path in kept if after[path] != before[path]] == []


def test_killed_run_leaves_no_orphan_and_ends_with_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, first: tuple[Repro, dict[str, str]]
) -> None:
    copy = make_project(tmp_path_factory.mktemp("pipeline") / "project", tiny_dir)
    process = subprocess.Popen(
        ["dvc", "repro"], cwd=copy, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not list((copy / ".work").glob("rollout-1/*/part-*.parquet")):
            assert process.poll() is None, "dvc ended before it sampled a shard"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 20
    while processes_in(copy) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_in(copy) == []
    assert not (copy / "data/rollouts/iteration=1").exists()

    again = repro(copy)
    assert "rollout@1" in again.ran
    assert "shards that were finished before" in again.output
    assert hashes(copy, *RESULTS) == first[1]
    assert sorted(path.name for path in (copy / ".work").rglob("*.parquet")) == []


def test_nothing_wrote_through_a_link_into_the_cache(project: Path) -> None:
    # The last step: every object in the cache still has the hash that is its name.
    objects = [path for path in (project / ".dvc/cache/files/md5").glob("*/*") if path.suffix != ".dir"]
    assert len(objects) > 30
    assert [
        path for path in objects if hashlib.md5(path.read_bytes()).hexdigest() != path.parent.name + path.name
    ] == []
