"""Files, links, caches and processes through real `dvc repro`, on a small project without models (tests/file_graph.py).

The tests are steps of one story in one project: each starts where the one before ended.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.errors import RlhfError
from rlhf_core.report.verify import verify
from tests.file_graph import dvc, environment, make, set_iterations

POLICY = "data/checkpoints/policy"
HEADS = [f"data/checkpoints/{kind}/2" for kind in ("policy", "critic", "optimizer")]
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations, run."""
    root = make(tmp_path_factory.mktemp("files") / "project")
    dvc(root, "repro", "--quiet")
    return root


@pytest.fixture(autouse=True)
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def walked(**options: bool) -> list[str]:
    return [found.path for found in verify(Path("."), HEADS, **({"allow_missing": False} | options))]


def ran(output: str) -> list[str]:
    return [line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")]


def cache_objects(root: Path) -> list[Path]:
    return [path for path in (root / ".dvc/cache/files/md5").glob("*/*") if path.suffix != ".dir"]


def damaged_objects(root: Path) -> list[Path]:
    """Objects that do not have the hash that is their name."""
    return [p for p in cache_objects(root) if hashlib.md5(p.read_bytes()).hexdigest() != p.parent.name + p.name]


def test_the_whole_lineage_of_the_last_checkpoints_is_walked_and_as_recorded() -> None:
    assert set(walked()) == {
        *HEADS,
        *(f"data/checkpoints/{kind}/{name}" for kind in ("policy", "critic", "optimizer") for name in "01"),
        *(f"data/{kind}/iteration={name}" for kind in ("rollouts", "advantages") for name in "12"),
        "data/prompts",
        "data/raw/prompts.jsonl",
    }


def flip_last_bit(path: Path) -> None:
    with path.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([byte[0] ^ 1]))


def test_a_flipped_bit_is_found_by_file_and_what_is_said_repairs_it(project: Path) -> None:
    # Through the hard link (root may write it): the cache has it too, so `dvc checkout` would bring it back.
    assert (project / POLICY / "1/model.safetensors").stat().st_nlink == 2
    flip_last_bit(project / POLICY / "1/model.safetensors")
    with pytest.raises(RlhfError) as caught:
        walked()
    said = str(caught.value)
    (object_,) = damaged_objects(project)
    assert said.startswith(f"{POLICY}/1/model.safetensors: expected sha256 ")
    assert (
        f"delete both, {POLICY}/1 and {object_.relative_to(project)}" in said
        and "else `dvc repro ppo_update@1`" in said
    )
    subprocess.run(["rm", "-r", f"{POLICY}/1", str(object_)], check=True)
    assert ran(dvc(project, "repro", "ppo_update@1")) == ["ppo_update@1"]
    assert len(walked()) == 15 and damaged_objects(project) == []


def test_stages_that_run_again_write_no_byte_into_the_linked_cache(project: Path) -> None:
    before = {path: path.stat().st_ino for path in cache_objects(project)}
    assert ran(dvc(project, "repro", "--force", "--single-item", "ppo_update@1", "rollout@1")) == [
        "ppo_update@1",
        "rollout@1",
    ]
    assert damaged_objects(project) == []
    assert {path: path.stat().st_ino for path in cache_objects(project)} == before


def test_a_flipped_bit_in_a_shard_is_found_by_its_page_and_in_its_footer_by_dvc_lock(project: Path) -> None:
    path = project / "data/rollouts/iteration=1/part-00000.parquet"
    whole = path.read_bytes()
    path.unlink()  # the cache keeps its own
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with pytest.raises(RlhfError, match=r"iteration=1/part-00000\.parquet: damaged"):
        walked()
    place = whole.index(b'"inputs"')  # our metadata: as good a JSON as before
    path.write_bytes(whole[: place + 1] + b"x" + whole[place + 2 :])
    found = r"part-00000\.parquet: expected md5 \w+ \(dvc\.lock\), found \w+: damaged"
    with pytest.raises(RlhfError, match=found) as caught:
        walked()
    assert "Delete data/rollouts/iteration=1, then `dvc checkout data/rollouts/iteration=1`" in str(caught.value)
    subprocess.run(["rm", "-r", "data/rollouts/iteration=1"], check=True)
    dvc(project, "checkout", "data/rollouts/iteration=1")
    assert len(walked()) == 15


def test_dvc_killed_takes_its_stage_along_and_a_second_writer_is_refused(project: Path) -> None:
    command = [sys.executable, "-m", "dvc", "repro", "--force", "--single-item", "rollout@2"]
    slow = {**environment(), "FILE_GRAPH_SLEEP": "60"}
    lock = project / ".work/rollout-2/lock"
    lock.write_text("")  # of the run before
    process = subprocess.Popen(command, cwd=project, env=slow, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not lock.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    stage = int(lock.read_text())
    again = [sys.executable, "-m", "tests.file_graph", "rollout", "2", "1"]
    second = subprocess.run(again, cwd=project, env=environment(), capture_output=True, text=True)
    assert second.returncode == 1 and f"rollout@2 is already running here (process {stage}" in second.stderr
    process.send_signal(signal.SIGKILL)
    process.wait()
    while Path(f"/proc/{stage}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{stage}").exists()
    left = RUNNER.invoke(app, ["doctor"]).output
    assert "left by a process that has ended" in left and "rollout-2" in left
    dvc(project, "repro")  # goes on at once, with what the run before left in DVC's run cache
    assert len(walked()) == 15


def test_a_missing_ancestor_is_named_and_passed_over_on_demand(project: Path) -> None:
    (project / POLICY / "1").rename(project / "aside")
    with pytest.raises(
        RlhfError, match=r"policy/1: missing, .*`dvc repro ppo_update@1` makes it again.*--allow-missing"
    ):
        walked()
    done = RUNNER.invoke(app, ["verify", "policy/2", "--allow-missing"])
    assert done.exit_code == 0, done.output
    assert f"--  {POLICY}/1 (missing)" in done.output and "ok  data/raw/prompts.jsonl" in done.output
    (project / "aside").rename(project / POLICY / "1")


def test_prune_drops_the_middle_and_the_next_iteration_runs(project: Path) -> None:
    remote = f"[core]\nremote = store\n['remote \"store\"']\nurl = {project.parent / 'store'}\n"
    (project / ".dvc/config.local").write_text(remote)
    dvc(project, "push", f"{POLICY}/1")
    before = len(cache_objects(project))
    done = RUNNER.invoke(app, ["prune", "--keep-last", "1", "--yes"])
    assert done.exit_code == 0 and "keep 2: the head of a chain" in done.output, done.output
    assert sorted(path.name for path in (project / POLICY).iterdir()) == ["0", "2"]
    # Of iteration 1 weights and lineages; of the three lineages two are the same, and the configs are those of 0 and 2.
    assert len(cache_objects(project)) == before - 5
    set_iterations(project, 3)
    assert ran(dvc(project, "repro", "--allow-missing")) == ["rollout@3", "advantages@3", "ppo_update@3"]
    assert sorted(path.name for path in (project / POLICY).iterdir()) == ["0", "2", "3"]


def test_prune_goes_on_where_it_stopped_and_keeps_what_the_next_iteration_reads(project: Path) -> None:
    set_iterations(project, 4)  # not run yet
    done = RUNNER.invoke(app, ["prune", "--keep-last", "1", "--yes"])
    assert done.exit_code == 0, done.output
    assert "drop 2: " in done.output and "drop 3" not in done.output and "drop 1" not in done.output
    assert f"keep {POLICY}/3: rollout@4 needs it and is not up to date" in done.output
    set_iterations(project, 3)


def test_the_lineage_is_walked_through_pruned_checkpoints(project: Path) -> None:
    done = RUNNER.invoke(app, ["verify"])
    assert done.exit_code == 0, done.output
    assert f"--  {POLICY}/1 (dropped by `rlhf prune`)" in done.output and "ok  data/raw/prompts.jsonl" in done.output
    assert "; 6 not looked at" in done.output


def test_a_pruned_checkpoint_is_fetched_from_a_remote_or_made_again(project: Path) -> None:
    dvc(project, "pull", f"{POLICY}/1")
    assert f"ok  {POLICY}/1 " in RUNNER.invoke(app, ["verify", "policy/1"]).output
    assert ran(dvc(project, "repro", "ppo_update@1")) == ["ppo_update@1"]
    assert "; 3 not looked at" in RUNNER.invoke(app, ["verify"]).output  # those of iteration 2
