"""The command line: iterations.yaml survives edits and Ctrl-C, exit codes are passed on, rows are shown safely."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_core import cli
from rlhf_core.artifacts.schema import scores_schema
from rlhf_core.artifacts.shards import read_table, write_shard
from rlhf_core.cli import app, append_iterations, iterations_since_best
from rlhf_core.config import load_run
from rlhf_core.errors import RlhfError
from rlhf_core.report import doctor
from stages import report
from tests.command import rlhf
from tests.fake_run import build, three_iterations

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration files alone, in the current directory."""
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text())
    (tmp_path / "iterations.yaml").write_text(three_iterations())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("run"), prompts=6, samples=2)


def fake_dvc(root: Path, code: str) -> None:
    """A `dvc` module that shadows the real one in this directory."""
    (root / "dvc").mkdir()
    (root / "dvc/__init__.py").touch()
    (root / "dvc/__main__.py").write_text(code)


# --- iterate ------------------------------------------------------------------------------------------------------


def test_appending_keeps_comments_quotes_and_order(project: Path) -> None:
    before = (project / "iterations.yaml").read_text()
    assert append_iterations(project, 2, None) == ["4", "5"]
    assert (project / "iterations.yaml").read_text() == before + (
        '  "4": {prev: "3", rollout: {}, score: {}, advantages: {}, ppo_update: {}}\n'
        '  "5": {prev: "4", rollout: {}, score: {}, advantages: {}, ppo_update: {}}\n'
    )
    assert load_run(project).chain("5") == ["1", "2", "3", "4", "5"]


def test_rolling_back_starts_from_an_earlier_iteration(project: Path) -> None:
    append_iterations(project, 2, "1")
    assert load_run(project).chain("5") == ["1", "4", "5"]
    append_iterations(project, 1, "0")
    assert load_run(project).chain("6") == ["6"]


def test_names_follow_the_highest_number(project: Path) -> None:
    text = (project / "iterations.yaml").read_text()
    entry = "{prev: '2', rollout: {}, score: {}, advantages: {ppo: 1}, ppo_update: {}}".replace(
        "{ppo: 1}", "{gamma: 0.9}"
    )
    (project / "iterations.yaml").write_text(text + f"  '17': {entry}  # a longer step\n  \"3b\": {entry}\n")
    assert append_iterations(project, 1, None) == ["18"]
    after = (project / "iterations.yaml").read_text()
    assert f"  '17': {entry}  # a longer step\n" in after
    # The last entry is the end of the chain, whatever its name.
    assert load_run(project).iterations["18"].prev == "3b"


def test_first_iteration_of_an_empty_list(project: Path) -> None:
    (project / "iterations.yaml").write_text("iterations: {}\n")
    assert append_iterations(project, 2, None) == ["1", "2"]
    assert load_run(project).chain("2") == ["1", "2"]


def test_unknown_prev_changes_nothing(project: Path) -> None:
    before = (project / "iterations.yaml").read_bytes()
    with pytest.raises(RlhfError, match=r"--prev 9: no such iteration; expected one of 0, 1, 2, 3"):
        append_iterations(project, 1, "9")
    assert (project / "iterations.yaml").read_bytes() == before


def test_invalid_file_is_refused_before_it_is_touched(project: Path) -> None:
    (project / "iterations.yaml").write_text("iterations:\n  1: {prev: '0'}\n")
    found = rlhf("iterate", "--no-run", root=project)
    assert found.returncode == 1
    assert 'iteration key 1 is not quoted; write "1":' in found.stderr
    assert "Traceback" not in found.stderr
    assert (project / "iterations.yaml").read_text() == "iterations:\n  1: {prev: '0'}\n"


def test_no_run_only_appends(project: Path) -> None:
    fake_dvc(project, "raise SystemExit('dvc was started')")
    found = rlhf("iterate", "--count", "2", "--no-run", root=project)
    assert (found.returncode, found.stdout) == (0, "iterations.yaml: added 4, 5\n")


def test_exit_code_and_output_of_dvc_are_passed_on(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake_dvc(project, "import sys; print('Running', sys.argv[1:]); sys.exit(255)")
    assert rlhf("iterate", root=project).returncode == 255
    assert "Running ['repro']" in capfd.readouterr().out
    # The entry stays: dvc repro goes on where it stopped.
    assert list(load_run(project).iterations) == ["1", "2", "3", "4"]


def test_ctrl_c_leaves_a_valid_file(project: Path) -> None:
    fake_dvc(project, "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_core.cli", "iterate"],
        cwd=project, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not (project / "started").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"rlhf_core" not in errors  # no traceback of ours
    assert list(load_run(project).iterations) == ["1", "2", "3", "4"]
    assert not list(project.glob(".iterations*"))


RUNS = """
import json, pathlib
from ruamel.yaml import YAML
scores = {scores}
for name in ["0", *YAML(typ="safe").load(pathlib.Path("iterations.yaml"))["iterations"]]:
    for stage in ("rollout", "score", "advantages", "ppo_update", "evaluate"):
        path = pathlib.Path(f"data/metrics/{{stage}}/{{name}}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {{"eval/score_mean": scores[int(name)]}} if stage == "evaluate" else {{f"{{stage}}/x": 1.0}}
        path.write_text(json.dumps(content))
with open("runs", "a") as log:
    log.write(name + " ")
"""


@pytest.mark.parametrize(
    "scores, options, runs, words",
    [
        # Best at iteration 4; 5 and 6 bring no new best.
        (
            [0.0, 0.1, 0.2, 0.3, 0.5, 0.5, 0.4, 0.9],
            ["--patience", "2"],
            "3 4 5 6 ",
            "no new best for 2 iterations: converged",
        ),
        # Nothing has risen already: the three that are there run, and none is added.
        ([0.5, 0.4, 0.3, 0.2], ["--patience", "3"], "3 ", "no new best for 3 iterations: converged"),
        (
            [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
            ["--max", "2"],
            "3 4 5 ",
            "2 iterations added and eval/score_mean may still rise",
        ),
    ],
)
def test_until_converged(project: Path, scores: list[float], options: list[str], runs: str, words: str) -> None:
    fake_dvc(project, RUNS.format(scores=scores))
    found = rlhf("iterate", "--until-converged", *options, root=project)
    assert found.returncode == 0, found.stderr
    assert (project / "runs").read_text() == runs
    assert words in found.stdout
    assert found.stdout.count("0 (base)") == len(runs.split())  # the table after each


def test_until_converged_from_an_earlier_iteration(project: Path) -> None:
    fake_dvc(project, RUNS.format(scores=[0.0, 0.1, 0.9, 0.9, 0.2, 0.15, 0.1]))
    found = rlhf("iterate", "--until-converged", "--prev", "1", "--patience", "2", root=project)
    assert found.returncode == 0, found.stderr
    # The chain is 0 1 4 5 6: its best is 4, and two without a new best follow.
    assert (project / "runs").read_text() == "4 5 6 "
    assert load_run(project).chain("6") == ["1", "4", "5", "6"]


def test_until_converged_stops_when_a_run_fails(project: Path) -> None:
    fake_dvc(project, "raise SystemExit(255)")
    assert rlhf("iterate", "--until-converged", root=project).returncode == 255
    assert list(load_run(project).iterations) == ["1", "2", "3"]


def test_unknown_metric_names_the_ones_there_are(project: Path) -> None:
    fake_dvc(project, RUNS.format(scores=[0.0] * 9))
    found = rlhf("iterate", "--until-converged", "--metric", "eval/scroe", root=project)
    assert found.returncode == 1
    assert "iteration 1 has no metric eval/scroe; it has eval/score_mean" in found.stderr


@pytest.mark.parametrize(
    "values, since",
    [
        ([1.0], 0),
        ([1.0, 2.0], 0),
        ([2.0, 1.0], 1),
        ([1.0, 1.0, 1.0], 2),
        ([1.0, 3.0, 2.0, 2.5], 2),
        ([-1.0, -2.0, -0.5], 0),
    ],
)
def test_iterations_since_the_best(values: list[float], since: int) -> None:
    rows = {str(index): {"m": value} for index, value in enumerate(values)}
    assert iterations_since_best(rows, "m") == since


def test_base_model_without_the_metric_does_not_count() -> None:
    assert iterations_since_best({"0": {}, "1": {"m": 2.0}, "2": {"m": 1.0}}, "m") == 1


# --- inspect ------------------------------------------------------------------------------------------------------


def test_inspect_shows_the_rows_that_pass(run: Path) -> None:
    found = rlhf(
        "inspect",
        "data/scores",
        "--where",
        "score > 0.5 and finish_reason == 'stop'",
        "--sort",
        "-score",
        "--limit",
        "1",
        root=run,
    )
    assert found.returncode == 0, found.stderr
    heading, *lines = found.stdout.splitlines()
    assert heading.startswith("iteration 1 · 1-train")
    assert "finish_reason stop" in heading and "score 1.0100" in heading and "kl 0.0000" in heading
    assert "  prompt" in lines and "  response" in lines


def test_inspect_makes_escapes_and_markup_inert(run: Path) -> None:
    found = rlhf("inspect", "data/evaluations/iteration=3", "--sample-id", "3-eval001-0", "--tokens", root=run)
    assert found.returncode == 0, found.stderr
    assert r'<script>alert("x")</script>\x1b[31mred\x1b[0m \u202eesrever' in found.stdout
    assert "\x1b" not in found.stdout and "\u202e" not in found.stdout


def test_inspect_tokens_line_up_with_their_numbers(run: Path) -> None:
    found = rlhf("inspect", "data/advantages", "--sample-id", "2-train000-1", "--tokens", root=run)
    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    names = ["logprob", "ref", "value", "weight", "reward", "advantage", "return"]
    start = lines.index(["#", "id", "token", *names])
    first = lines[start + 1]
    row = json.loads(rlhf("inspect", "data/advantages", "--sample-id", "2-train000-1", "--json", root=run).stdout)
    assert first[:3] == ["0", str(row["response_ids"][0]), row["response"][0]]
    columns = ("logprobs", "ref_logprobs", "values", "importance_weights", "rewards", "advantages", "returns")
    assert first[3:] == [f"{row[name][0]:.4f}" for name in columns]
    length = len(row["response_ids"])
    assert lines[start + length][0] == str(length - 1)
    assert lines[start + length + 1] == ["end", f"{row['bootstrap_value']:.4f}"]  # no return after the last token


def test_inspect_shows_tokens_of_a_run_without_critic(run: Path, tmp_path: Path) -> None:
    table = read_table(run / "data/scores/iteration=1").drop_columns(["values", "bootstrap_value"])
    schema = scores_schema(["reward_model"], critic=False)
    write_shard(tmp_path / "data/scores/part-00000.parquet", table, schema, {})
    shutil.copytree(run / "data/checkpoints", tmp_path / "data/checkpoints")
    found = rlhf("inspect", "data/scores", "--limit", "1", "--tokens", root=tmp_path)
    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    assert ["#", "id", "token", "logprob", "ref"] in lines
    assert not any(line[:1] == ["end"] for line in lines)


def test_inspect_json_has_every_column(run: Path) -> None:
    found = rlhf("inspect", "data/scores", "--json", "--limit", "0", root=run)
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(rows) == 36
    assert {"prompt_ids", "sampler_logprobs", "values", "kl", "num_tokens", "iteration"} <= set(rows[0])
    assert found.stdout.isascii()


def test_inspect_columns_make_a_table(run: Path) -> None:
    found = rlhf("inspect", "data/prompts", "--columns", "prompt_id,split", "--limit", "2", root=run)
    assert [line.split() for line in found.stdout.splitlines()] == [
        ["prompt_id", "split"],
        ["train000", "train"],
        ["train001", "train"],
    ]


@pytest.mark.parametrize("name", ["prompts", "preferences", "rollouts", "scores", "advantages", "evaluations"])
def test_inspect_opens_every_artifact(run: Path, name: str) -> None:
    found = CliRunner().invoke(app, ["inspect", str(run / "data" / name)])
    assert found.exit_code == 0, found.output
    assert "prompt" in found.output


def test_inspect_without_rows_says_so(run: Path) -> None:
    found = rlhf("inspect", "data/scores", "--where", "score > 99", root=run)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "no row passes\n")


def test_inspect_warns_about_another_tokenizer(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    text = (run / "data/checkpoints/policy/0/tokenizer.json").read_text()
    other.write_text(text + "\n")
    found = rlhf("inspect", "data/rollouts", "--limit", "1", "--tokens", "--tokenizer", str(tmp_path), root=run)
    assert found.returncode == 0
    assert "is not the tokenizer that data/rollouts was made with" in found.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["data/nothing"], "data/nothing: no such directory"),
        (["data/scores", "--where", "exit()"], "filter: 'exit()' is not allowed"),
        (["data/prompts", "--tokens"], "--tokens needs response_ids"),
        (["data/preferences", "--tokens"], "--tokens needs response_ids"),
        (["data/scores", "--columns", "reward"], "has no column reward"),
    ],
)
def test_inspect_errors_are_one_line(run: Path, arguments: list[str], words: str) -> None:
    found = rlhf("inspect", *arguments, root=run)
    assert found.returncode == 1
    assert words in found.stderr
    assert "Traceback" not in found.stderr and found.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error(run: Path) -> None:
    command = f"{sys.executable} -m rlhf_core.cli inspect data/scores --json --limit 0 | head -1"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    found = subprocess.run(
        ["bash", "-c", command], cwd=run, capture_output=True, text=True, env=environment, check=False
    )
    assert found.stderr == ""


# --- summary and doctor -------------------------------------------------------------------------------------------


def test_summary_shows_base_and_every_iteration(run: Path) -> None:
    with contextlib.chdir(run):
        report.main()
    found = rlhf("summary", root=run)
    assert found.returncode == 0, found.stderr
    first_words = [line.split()[0] for line in found.stdout.splitlines()[1:]]
    assert first_words[:5] == ["iteration", "0", "1", "2", "3"]
    assert "95% interval" in found.stdout and "data/report/index.html" in found.stdout


def test_doctor_of_a_checkout(project: Path) -> None:
    found = CliRunner().invoke(app, ["doctor"])
    assert "params.yaml and iterations.yaml are valid, 3 iterations" in found.output
    assert "torch" in found.output and "free" in found.output


def test_doctor_fails_on_invalid_parameters(project: Path) -> None:
    (project / "params.yaml").write_text((project / "params.yaml").read_text().replace("gamma: 1.0", "gamma: 1.5"))
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == 1
    assert "advantages.gamma" in found.output


@pytest.mark.parametrize(
    "check, status",
    [
        (doctor.python_check((3, 10)), "error"),
        (doctor.python_check((3, 12)), "ok"),
        (doctor.platform_check("Linux", "x86_64"), "ok"),
        (doctor.platform_check("Linux", "riscv64"), "warning"),
        (doctor.platform_check("Darwin", "arm64"), "error"),
        (doctor.disk_check(1 * 2**30), "error"),
        (doctor.disk_check(5 * 2**30), "warning"),
        (doctor.disk_check(50 * 2**30), "ok"),
    ],
)
def test_doctor_checks(check: doctor.Check, status: str) -> None:
    assert check.status == status


def lock_status(root: Path, text: str) -> tuple[str, str]:
    path = root / ".dvc/tmp/rwlock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    found = doctor.lock_checks(root)[-1]
    return found.status, found.text


def test_doctor_tells_a_dead_dvc_from_a_living_one(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    entry = {"write": {"a": {"pid": ended.pid, "cmd": "dvc repro"}}, "read": {}}
    assert lock_status(tmp_path, json.dumps(entry)) == ("ok", "left by a process that has ended; DVC clears it")
    command = [sys.executable, "-c", "input(1)", "dvc"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as living:
        assert living.stdout is not None and living.stdout.read(1) == b"1"  # it runs, under its own name
        entry["read"] = {"b": [{"pid": living.pid, "cmd": "dvc status"}]}
        status, text = lock_status(tmp_path, json.dumps(entry))
        living.communicate(b"\n")
    assert status == "warning" and f"held by dvc, process {living.pid}" in text
    # This process has a number that a killed dvc might have had.
    entry["read"] = {"b": [{"pid": os.getpid(), "cmd": "dvc status"}]}
    status, text = lock_status(tmp_path, json.dumps(entry))
    assert status == "error" and f"names process {os.getpid()} (" in text and "which is no dvc" in text
    assert lock_status(tmp_path, '{"write": {"a"')[0] == "error"
    assert lock_status(tmp_path, "")[0] == "ok"


def test_doctor_shows_partial_work_and_its_size(tmp_path: Path) -> None:
    part = tmp_path / ".work/rollout-2/0123/part-00000.parquet"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 20_480)
    (tmp_path / ".work/score-1").mkdir()
    found = doctor.lock_checks(tmp_path)[1]
    assert found.name == "partial work" and found.text.startswith("rollout-2 (20.0 KiB); `dvc repro` goes on from it")


def test_doctor_sees_a_running_stage(tmp_path: Path) -> None:
    lock = tmp_path / ".work/rollout-1/lock"
    lock.parent.mkdir(parents=True)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert "rollout-1 is running here" in doctor.lock_checks(tmp_path)[0].text
        holder.communicate(b"\n")
    assert doctor.lock_checks(tmp_path)[0].status == "ok"


# --- imports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["rlhf_core.cli", "stages.report", "rlhf_core.report.table"])
def test_no_model_library_is_imported(module: str) -> None:
    heavy = ("torch", "transformers", "vllm", "pandas", "duckdb", "polars", "datasets", "numba")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_cli_module_names_the_entry_point() -> None:
    assert callable(cli.main)
