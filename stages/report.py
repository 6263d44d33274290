"""Metrics over iterations, curves, the health table and completions side by side.

Reads the metric files and held-out evaluations of all iterations; writes data/metrics/summary.json,
data/plots/iterations.csv and data/report/index.html.
"""

import shutil
from pathlib import Path

from rlhf_core.config import load_run
from rlhf_core.report.html import render
from rlhf_core.report.metrics import iterations_csv, read_history, summary, write_text
from rlhf_core.stage import publish, run_stage, work_root, write_json

ROOT = Path(".")


def main() -> None:
    """Read, compare, write. Takes seconds, so unfinished work is thrown away rather than resumed."""
    history = read_history(load_run(ROOT), ROOT)
    page = render(history)
    finished = work_root("report") / "page"
    shutil.rmtree(finished, ignore_errors=True)
    write_text(finished / "index.html", page)
    write_json(Path("data/metrics/summary.json"), summary(history))
    write_text(Path("data/plots/iterations.csv"), iterations_csv(history))
    publish(finished, Path("data/report"))


if __name__ == "__main__":
    run_stage("report", main)
