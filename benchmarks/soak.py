"""Does anything grow over iterations of a tiny model through dvc repro? `python -m benchmarks.soak [ITERATIONS]`.

A copy of the project in a temporary directory, every stage a process of its own, vLLM sampling; iterations are appended
one at a time, and run up to the new policy: evaluate and report hand nothing on. Prints one JSON object for each
iteration, and draws docs/soak.svg.
"""

import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import charts
from rlhf_core.report.plots import Series
from tests.pipeline.project import make_project, processes_in, repro, set_iterations
from tests.tiny import save_tiny

PLOT = Path(__file__).parents[1] / "docs/soak.svg"
STAGES = ("rollout", "score", "advantages", "ppo_update")
PROCESSES = ("dvc", *STAGES)
PACE = 0.1  # seconds between two looks at the processes


@dataclass
class Process:
    """What was seen of one process."""

    first: float  # seconds, monotonic
    last: float
    memory: int  # KiB, the most it ever had
    files: int  # the most seen open at once


def main() -> None:
    """Run, measure each iteration, draw."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        project = make_project(Path(directory) / "project", save_tiny(Path(directory) / "model"))
        repro(project, "train_rm", "init_critic")  # so that all iterations have the same to do
        used = bytes_below(project)
        for number in range(1, count + 1):
            set_iterations(project, {str(key): str(key - 1) for key in range(1, number + 1)})
            row = watched_repro(project, str(number))
            before, used = used, bytes_below(project)
            files = sum(path.is_file() for path in (project / ".work").rglob("*"))
            rows.append({"iteration": number, **row, "disk_kib": round((used - before) / 1024), "work_files": files})
            print(json.dumps(rows[-1]), flush=True)
            PLOT.write_text(plot(rows), encoding="utf-8")


def watched_repro(project: Path, iteration: str) -> dict[str, Any]:
    """Run `dvc repro` up to the new policy; return seconds, of its stages too, and memory and files of each process."""
    seen: dict[str, Process] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(PACE):
            for number in processes_in(project):
                look(number, seen)

    watcher, start = threading.Thread(target=watch), time.monotonic()
    watcher.start()
    try:
        ran = repro(project, f"ppo_update@{iteration}").ran
    finally:
        ended.set()
        watcher.join()
    assert [name for name in ran if "@" in name] == [f"{stage}@{iteration}" for stage in STAGES], ran
    return {
        "seconds": round(time.monotonic() - start, 1),
        "stage_seconds": round(sum(one.last - one.first for name, one in seen.items() if name != "dvc"), 1),
        "memory_mib": {name: round(one.memory / 1024) for name, one in seen.items()},
        "open_files": {name: one.files for name, one in seen.items()},
    }


def look(number: int, seen: dict[str, Process]) -> None:
    """Add what a process is now to what was seen of its stage, or of dvc."""
    directory, now = Path("/proc") / str(number), time.monotonic()
    try:
        words = (directory / "cmdline").read_bytes().decode().split("\0")
        names = [word.removeprefix("stages.") for word in words if word.startswith("stages.")]
        name = names[0] if names else "dvc" if any(word.endswith("/dvc") for word in words) else None
        memory = next(line for line in (directory / "status").read_text().splitlines() if line.startswith("VmHWM"))
        files = len(list((directory / "fd").iterdir()))
    except (OSError, StopIteration):
        return  # it has just ended
    if name is not None:
        one = seen.setdefault(name, Process(now, now, 0, 0))
        one.last, one.memory, one.files = now, max(one.memory, int(memory.split()[1])), max(one.files, files)


def bytes_below(directory: Path) -> int:
    """Bytes of all files of a directory, those with several names once: the workspace is linked to dvc's cache."""
    found = {stat.st_ino: stat.st_size for path in directory.rglob("*") if (stat := path.lstat()) and path.is_file()}
    return sum(found.values())


def plot(rows: list[dict[str, Any]]) -> str:
    """Return four charts over the iterations, as one SVG file."""
    labels = [str(row["iteration"]) for row in rows]
    by_process = {
        key: [Series(name, [row[key].get(name) for row in rows]) for name in PROCESSES]
        for key in ("memory_mib", "open_files")
    }
    seconds = [
        Series(name, [row[key] for row in rows]) for name, key in (("all", "seconds"), ("stages", "stage_seconds"))
    ]
    lines = {
        "memory at its peak, MiB": by_process["memory_mib"],
        "open files at most": by_process["open_files"],
        "seconds": seconds,
        "disk, KiB more than before": [Series("all", [row["disk_kib"] for row in rows])],
    }
    return charts.svg([charts.Chart(title, "iteration", labels, series) for title, series in lines.items()])


if __name__ == "__main__":
    main()
