"""Thirty iterations of a tiny model through dvc repro: does anything grow? `python -m benchmarks.soak [ITERATIONS]`.

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

from markupsafe import Markup

from rlhf_core.report.plots import HEIGHT, WIDTH, Series, line_chart
from tests.pipeline.project import make_project, processes_in, repro, set_iterations
from tests.tiny import save_tiny

PLOT = Path(__file__).parents[1] / "docs/soak.svg"
STAGES = ("rollout", "score", "advantages", "ppo_update")
PROCESSES = ("dvc", *STAGES)
COLOURS = ("#111827", "#2563eb", "#dc2626", "#16a34a", "#d97706")
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
    charts = {
        "memory at its peak, MiB": by_process["memory_mib"],
        "open files at most": by_process["open_files"],
        "seconds": seconds,
        "disk, KiB more than before": [Series("all", [row["disk_kib"] for row in rows])],
    }
    parts = [Markup("<style>{}</style>").format(Markup(style()))]
    for index, (title, series) in enumerate(charts.items()):
        x, y = (WIDTH + 20) * (index % 2), (HEIGHT + 24) * (index // 2)
        chart = line_chart(labels, series, x_title="iteration", y_title=title, band=(0, None))
        size = f'<svg x="{x}" y="{y + 20}" width="{WIDTH}" height="{HEIGHT}" class="chart"'
        parts.append(Markup(str(chart).replace('<svg class="chart"', size, 1)))
        for at, one in enumerate(series):
            parts.append(
                Markup('<text class="l{}" x="{}" y="{}">{}</text>').format(at, x + 56 + 72 * at, y + 14, one.label)
            )
    width, height = 2 * WIDTH + 20, 2 * (HEIGHT + 24)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return f"{head}{Markup().join(parts)}</svg>\n"


def style() -> str:
    """Return the CSS of the charts."""
    lines = ["svg { font-family: sans-serif; font-size: 11px; background: #fff }"]
    lines.append(".grid { stroke: #ddd } .tick, .axis { fill: #555 } .band { fill: none } .line { fill: none }")
    for index, colour in enumerate(COLOURS):
        lines.append(
            f".line.s{index} {{ stroke: {colour}; stroke-width: 1.8 }} .dot.s{index}, .l{index} {{ fill: {colour} }}"
        )
    return " ".join(lines)


if __name__ == "__main__":
    main()
