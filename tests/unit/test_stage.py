"""What surrounds a stage: lock, work directory, publishing, errors as text, death with the parent.

Mutations that must fail here: LOCK_EX made LOCK_SH; the stale work directory kept; os.replace made a copy; the
temporary file of write_json named like its target; prctl left out; except RlhfError made except Exception.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlhf_core.errors import RlhfError
from rlhf_core.stage import exclusive, publish, work_directory, work_root, write_json

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def python(body: str) -> "subprocess.Popen[str]":
    """Start a Python process with the project importable, in the current directory."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: object, seconds: float = 20.0) -> bool:
    assert callable(condition)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_same_fingerprint_continues_where_it_was() -> None:
    first = work_directory("rollout@1", {"a": 1, "b": [1, 2]})
    (first / "part").write_text("x")
    assert work_directory("rollout@1", {"b": [1, 2], "a": 1}) == first
    assert (first / "part").read_text() == "x"


@pytest.mark.parametrize("other", [{"a": 2}, {"a": "1"}, {"a": 1, "b": None}, {}])
def test_another_fingerprint_starts_clean_and_removes_the_old(other: dict[str, object]) -> None:
    first = work_directory("rollout@1", {"a": 1})
    (first / "part").write_text("x")
    second = work_directory("rollout@1", other)
    assert second != first
    assert list(second.iterdir()) == []
    assert not first.exists()


def test_work_of_other_stages_and_iterations_stays() -> None:
    kept = [work_directory(name, {"a": 1}) for name in ("rollout@2", "score@1", "rollout@11")]
    work_directory("rollout@1", {"a": 1})
    work_directory("rollout@1", {"a": 2})
    assert all(path.is_dir() for path in kept)


def test_lock_file_survives_a_change_of_fingerprint() -> None:
    with exclusive("rollout@1"):
        work_directory("rollout@1", {"a": 1})
        work_directory("rollout@1", {"a": 2})
        assert (work_root("rollout@1") / "lock").read_text() == str(os.getpid())


def test_second_process_of_a_stage_is_refused_with_the_first_ones_number() -> None:
    holder = python(
        """
        import sys
        from rlhf_core.stage import exclusive
        with exclusive("score@1"):
            print("held", flush=True)
            sys.stdin.read()
        """
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(RlhfError, match=rf"score@1 is already running here \(process {holder.pid}"),
            exclusive("score@1"),
        ):
            pass
        with exclusive("score@2"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with exclusive("score@1"):  # the kernel released it
        pass


def test_publish_replaces_a_directory_whole(tmp_path: Path) -> None:
    finished, out = tmp_path / "work" / "new", tmp_path / "data" / "out"
    for directory, name in ((finished, "new.txt"), (out, "old.txt")):
        directory.mkdir(parents=True)
        (directory / name).write_text(name)
    publish(finished, out)
    assert [path.name for path in out.iterdir()] == ["new.txt"]
    assert not finished.exists()


def test_publish_replaces_a_file_and_makes_parents(tmp_path: Path) -> None:
    for content in ("one", "two"):
        (tmp_path / "f").write_text(content)
        publish(tmp_path / "f", tmp_path / "a" / "b" / "f")
        assert (tmp_path / "a" / "b" / "f").read_text() == content


def test_publish_does_not_write_through_a_hard_link(tmp_path: Path) -> None:
    # DVC links outs to its cache; writing into them in place would corrupt the cache.
    (tmp_path / "cache").write_text("cached")
    os.link(tmp_path / "cache", tmp_path / "out")
    (tmp_path / "new").write_text("new")
    publish(tmp_path / "new", tmp_path / "out")
    assert (tmp_path / "cache").read_text() == "cached"


def test_json_is_sorted_readable_and_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "m" / "x.json", {"b": 1.5, "a": "ü"})
    assert (tmp_path / "m" / "x.json").read_text(encoding="utf-8") == '{\n  "a": "ü",\n  "b": 1.5\n}\n'
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["x.json"]


def test_json_does_not_write_through_a_hard_link(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("cached")
    os.link(tmp_path / "cache", tmp_path / "x.json")
    write_json(tmp_path / "x.json", {})
    assert (tmp_path / "cache").read_text() == "cached"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_what_is_not_json_and_keeps_the_old_file(tmp_path: Path, value: float) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": value})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def run_stage(body: str) -> tuple[int, str]:
    process = python(
        f"from rlhf_core.stage import run_stage\nfrom rlhf_core.errors import DataError\n{textwrap.dedent(body)}"
    )
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def test_our_errors_are_text_without_a_traceback() -> None:
    code, stderr = run_stage(
        """
        def main(): raise DataError("data/raw/x.jsonl, line 3: no prompt")
        run_stage("ingest", main)
        """
    )
    assert code == 1
    assert "DataError: data/raw/x.jsonl, line 3: no prompt" in stderr
    assert "Traceback" not in stderr


def test_bugs_keep_their_traceback() -> None:
    code, stderr = run_stage(
        """
        def main(): raise RuntimeError("a bug")
        run_stage("ingest", main)
        """
    )
    assert code == 1
    assert "Traceback" in stderr


def test_a_stages_own_exit_code_is_kept() -> None:
    code, _ = run_stage(
        """
        import sys
        run_stage("ingest", lambda: sys.exit(3))
        """
    )
    assert code == 3


def test_stage_dies_when_its_parent_is_killed() -> None:
    parent = python(
        """
        import subprocess, sys
        child = "import time; from rlhf_core.stage import run_stage; "
        child += "run_stage('x', lambda: (print('up', flush=True), time.sleep(60)))"
        process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        print(process.pid, flush=True)
        process.wait()
        """
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert wait_for(lambda: not alive(child))
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_a_process_whose_launcher_died_while_it_started_ends() -> None:
    body = "from rlhf_core.stage import die_with_parent; die_with_parent(); print('goes on')"
    for launcher, expected in ((str(os.getpid()), "goes on\n"), ("1", "")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RLHF_LAUNCHER": launcher}
        found = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True, text=True)
        assert found.stdout == expected
        assert ("has died" in found.stderr) == (expected == "")
