"""The report stage as DVC runs it: three files, whole or not at all, the same bytes again."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.fake_run import build

PROJECT = Path(__file__).parents[2]
OUTS = ("data/metrics/summary.json", "data/plots/iterations.csv", "data/report/index.html")


def report(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        [sys.executable, "-m", "stages.report"], cwd=root, capture_output=True, text=True, env=environment, check=False
    )


def test_writes_summary_curves_and_page(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=5, samples=2)
    found = report(root)
    assert found.returncode == 0, found.stderr
    summary = json.loads((root / OUTS[0]).read_text())
    assert summary["iterations"] == 3 and summary["val/ratio"] == 1.01
    rows = list(csv.DictReader((root / OUTS[1]).open()))
    assert [row["objective/kl"] for row in rows] == ["0.0", "1.6", "3.2"]
    assert [path.name for path in (root / "data/report").iterdir()] == ["index.html"]


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=3, samples=2)
    assert report(root).returncode == 0
    first = [(root / out).read_bytes() for out in OUTS]
    assert report(root).returncode == 0
    assert [(root / out).read_bytes() for out in OUTS] == first


def test_metrics_of_removed_iterations_are_left_out(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=3, samples=2)
    lines = (root / "iterations.yaml").read_text().splitlines()
    (root / "iterations.yaml").write_text("\n".join(line for line in lines if not line.startswith('  "3"')) + "\n")
    assert report(root).returncode == 0
    assert [row["iteration"] for row in csv.DictReader((root / OUTS[1]).open())] == ["1", "2"]


def test_failure_leaves_no_output_and_names_the_file(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=3, samples=2)
    shard = root / "data/evaluations/iteration=2/part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    found = report(root)
    assert found.returncode == 1
    assert "iteration=2/part-00000.parquet: truncated" in found.stderr and "Traceback" not in found.stderr
    assert not any((root / out).exists() for out in OUTS)
