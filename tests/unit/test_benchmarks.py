"""benchmarks/: the helper's sums by hand, and every script at a tiny size, so that they stay alive.

Mutations that must fail here: a ratio turned round; the round that warms up counted; the first contender run alone.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import (
    advantages,
    against_trl,
    engine,
    gpu,
    growth,
    load,
    measure,
    ppo_update,
    score,
    scratch,
    soak,
    timed,
)
from rlhf_core.config import load_run
from rlhf_core.errors import ConfigError, RlhfError


def test_speeds_and_ratios_are_taken_round_by_round() -> None:
    seconds = {"bare": [1.0, 2.0, 4.0], "ours": [2.0, 2.0, 5.0]}
    assert measure.ratio(seconds, "bare", "ours") == measure.Spread(0.8, 0.5, 1.0)
    assert measure.speed(20, seconds["ours"]) == measure.Spread(10.0, 4.0, 10.0)
    assert measure.spread([3.0, 1.0]).text() == "2 (1 to 3)"


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    found = measure.interleaved({"a": lambda: calls.append("a"), "b": lambda: float(calls.append("b") or 7)}, 2)
    assert calls == ["a", "b"] * 3
    assert found["b"] == [7.0, 7.0] and len(found["a"]) == 2 and max(found["a"]) < 1


def test_a_child_s_memory_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "fill.py").write_text("import sys\nkept = b'1' * int(sys.argv[1])\n1 / len(kept)\n")
    ballast = b"1" * 2**26
    small, large = (measure.child("fill", str(size), cwd=tmp_path) for size in (1, 2**26))
    assert 2**20 < small.peak_bytes < len(ballast)
    assert 60 * 2**20 < large.peak_bytes - small.peak_bytes < 68 * 2**20
    with pytest.raises(RlhfError, match=r"fill 0 failed"):
        measure.child("fill", "0", cwd=tmp_path)


def test_a_result_names_where_it_was_measured(tmp_path: Path) -> None:
    found = measure.read_result(measure.written("name", {"ratio": 0.5}, tmp_path / "result.json"))
    assert found["benchmark"] == "name" and found["ratio"] == 0.5
    assert {"cpu", "cores", "threads", "torch", "vllm", "load"} <= set(found["environment"])


def run(module: Any, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, work: Path) -> Any:
    """Run a benchmark in a scratch directory, its children within this process, and return its result."""

    def child(*command: str, cwd: Path) -> measure.Child:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", list(command))
        importlib.import_module(command[0]).main()
        return measure.Child(seconds=1.0, peak_bytes=2**20)

    monkeypatch.chdir(work)  # where it goes back to when the test ends, whatever was removed meanwhile
    monkeypatch.setattr(measure, "child", child)
    result = work / "result.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--work", str(work / "scratch"), "--json", str(result), *arguments])
    module.main()
    return json.loads(result.read_text(encoding="utf-8"))


def test_advantages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--responses", "12", "--shard-responses", "5", "--kernel-tokens", "1000", "--mean-length", "10"]
    found = run(advantages, [*sizes, "--repeats", "1", "--set", "gae_lambda=0.9"], monkeypatch, tmp_path)
    assert found["stage"]["responses"] == 12 and found["stage"]["tokens"] > 12
    assert found["stage"]["speed_of_bare_parquet"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["stage"]["tokens_per_second"]["median"] == found["stage"]["tokens"]
    assert found["kernel"]["tokens_per_second"]["median"] > 0
    assert not (tmp_path / "scratch").exists()
    assert "| stage, peak memory in MiB | 1 |" in capsys.readouterr().out


def test_a_comparison_with_trl_takes_its_ratios_within_a_round() -> None:
    took = {
        name: [against_trl.Took(seconds, update, peak * 2**30, {})]
        for name, seconds, update, peak in [
            (next(iter(against_trl.OURS)), 30.0, 10.0, 2),
            ("TRL, float32", 120.0, 40.0, 8),
            ("TRL, bfloat16", 60.0, 25.0, 5),
        ]
    }
    ours = next(line for line in against_trl.tables(took, 1000).splitlines() if "shared critic" in line)
    # 30/120 of the time and 40/10 times the speed of the update; 30/60 and 25/10; 1000 tokens in 10 s.
    medians = [cell.split()[0] for cell in ours.strip("|").split("|")[1:]]
    assert medians == ["30", "2.0", "100", "0.25", "4", "0.5", "2.5"]


def test_a_setting_of_the_engine_is_a_multiple_of_the_project_s() -> None:
    ours = [{"tokens_per_second": 100.0, "start_seconds": 9.0}, {"tokens_per_second": 50.0, "start_seconds": 9.0}]
    runs = [{"tokens_per_second": 150.0, "start_seconds": 5.0}, {"tokens_per_second": 100.0, "start_seconds": 7.0}]
    found = engine.compared(runs, ours)
    assert found["speed"] == {"median": 1.75, "low": 1.5, "high": 2.0}
    assert found["start_seconds"]["median"] == 6.0


def test_calls_of_a_timed_function_add_up_and_errors_pass() -> None:
    seconds = {"a": 1.0}
    fails = timed.timed(lambda divisor: 1 / divisor, seconds, "a")
    assert fails(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        fails(0)
    assert 1.0 < seconds["a"] < 1.5


def test_a_scratch_project_reads_a_run_that_is_there_with_parameters_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make demo"):
        scratch.scratch_project(tmp_path / "work", tmp_path, {}, needed=("data/prompts",))
    (tmp_path / "data/prompts").mkdir(parents=True)
    scratch.scratch_project(tmp_path / "work", tmp_path, {"rollout": {"shard_prompts": 3}}, needed=("data/prompts",))
    assert (tmp_path / "work/data/prompts").resolve() == tmp_path / "data/prompts"
    assert load_run(tmp_path / "work").params.rollout.shard_prompts == 3


@pytest.mark.parametrize("name, steps", [("responses", 3), ("iterations", 3)])
def test_load(name: str, steps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["load", name, "10"])
    load.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = [row for row in told if "step" in row]
    assert len(found) == steps and all(row[name] == 10 and row["memory_mib"]["before"] > 0 for row in found)


def test_growth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "4", "8", "--lengths", "5", "--long-responses", "2", "--plot", str(tmp_path / "growth.svg")]
    found = run(growth, sizes, monkeypatch, tmp_path)
    assert list(found["rows"]) == ["4", "8"] and set(found["rows"]["4"]) == set(growth.STAGES)
    assert "| 5 | 1.0 s, 1 MiB |" in capsys.readouterr().out
    page = ElementTree.fromstring((tmp_path / "growth.svg").read_text(encoding="utf-8"))
    # A second for 4 or 8 responses, and for 2 of 5 tokens each.
    titles = {"".join(title.itertext()).split()[-1] for title in page.findall(".//{*}title")}
    assert len(page.findall("{*}svg")) == 4 and {"250", "125", "100,000"} <= titles


def test_soak_draws_what_it_measured() -> None:
    row = {"seconds": 9.0, "stage_seconds": 8.0, "disk_kib": 5, "memory_mib": {"dvc": 70}, "open_files": {"dvc": 9}}
    page = ElementTree.fromstring(soak.plot([{"iteration": 1, **row}, {"iteration": 2, **row, "seconds": 11.0}]))
    assert len(page.findall("{*}svg")) == 4
    assert {"9", "11"} <= {"".join(title.itertext()).split()[-1] for title in page.findall(".//{*}title")}


def test_soak_counts_linked_files_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert soak.bytes_below(tmp_path) == 3


SMALL = ["--responses", "6", "--prompt-tokens", "4", "--max-new-tokens", "9", "--logits-chunk-tokens", "4"]


@pytest.mark.parametrize("module, ours", [(ppo_update, "loop"), (score, "passes")])
def test_model_passes(
    module: Any, ours: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_dir: Path, caplog: Any
) -> None:
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)  # tests go on after it
    found = run(module, [*SMALL, "--model", str(tiny_dir), "--repeats", "1"], monkeypatch, tmp_path)["contenders"]
    assert list(found) == ["bare", ours]
    assert found["bare"]["speed_of_bare"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found[ours]["tokens_per_second"]["median"] > 0 and found[ours]["peak_bytes"]["median"] == 2**20
    own = [record.getMessage() for record in caplog.records if record.name == "rlhf"]
    assert not own  # such as that the first ratio is off 1: loop and scores are of one policy


def test_gpu_on_a_tiny_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "keep_freed_memory", lambda: None)
    found = run(gpu, [*SMALL, "--sizes", "tiny", "--peak-tflops", "0.1"], monkeypatch, tmp_path)["sizes"]["tiny"]
    assert found["agrees"] and found["logprob_difference"] < 1e-4
    share = 6 * found["parameters"] * found["ppo_update"]["tokens_per_second"] / 1e11
    assert found["ppo_update"]["flops_utilisation"] == pytest.approx(share)
