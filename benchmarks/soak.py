"""Thirty iterations of a tiny model in one process: does anything grow? `python -m benchmarks.soak [ITERATIONS]`.

Real stages (score, advantages, ppo_update) in a temporary directory, one after the other in this process, which is
harder on memory and open files than a process each, as in a run. Responses are made up instead of sampled, so that
the start of vLLM (6 s an iteration) is not what is measured. Writes docs/soak.json and docs/soak.svg.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from rlhf_core.stage import run_stage
from stages import advantages, ppo_update, score
from tests import tiny_run
from tests.tiny import save_tiny

DOCS = Path(__file__).parents[1] / "docs"
MEASURES = {
    "memory_mib": "memory of the process, MiB",
    "open_files": "open files",
    "disk_mib": "disk, MiB more than after the iteration before",
    "work_files": "files left in .work",
    "seconds": "seconds an iteration",
}
_PAGE = os.sysconf("SC_PAGE_SIZE")
WIDTH, HEIGHT, GAP = 640, 110, 34


def main() -> None:
    """Run, measure after every iteration, write both files."""
    iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        tiny_run.build(save_tiny(Path(directory) / "model"))
        entry = '  "{}": {{prev: "{}", rollout: {{}}, score: {{}}, advantages: {{}}, ppo_update: {{}}}}\n'
        text = "".join(entry.format(number, number - 1) for number in range(1, iterations + 1))
        Path("iterations.yaml").write_text(f"iterations:\n{text}")
        rows, used = [], bytes_below(Path())
        for number in range(1, iterations + 1):
            start = time.monotonic()
            run(number)
            seconds = time.monotonic() - start
            before, used = used, bytes_below(Path())
            rows.append(measured(number, seconds, used - before))
            print(json.dumps(rows[-1]), flush=True)
    (DOCS / "soak.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (DOCS / "soak.svg").write_text(plot(rows), encoding="utf-8")


def run(number: int) -> None:
    """One iteration, from made-up responses to the next policy."""
    key, prev = str(number), str(number - 1)
    if number > 1:
        tiny_run.write_rollouts(key, prev)
    for stage in (score, advantages, ppo_update):
        sys.argv = ["stage", key, prev]
        run_stage(f"{stage.__name__.removeprefix('stages.')}@{key}", stage.main)


def measured(number: int, seconds: float, grown: int) -> dict[str, float]:
    """What the process and the directory are like now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return {
        "iteration": number,
        "memory_mib": round(resident / 2**20, 1),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "disk_mib": round(grown / 2**20, 3),
        "work_files": sum(path.is_file() for path in Path(".work").rglob("*")),
        "seconds": round(seconds, 2),
    }


def bytes_below(directory: Path) -> int:
    """Bytes of all files of a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def plot(rows: list[dict[str, float]]) -> str:
    """One small chart for each measure, from 0 up, as SVG."""
    parts = []
    for index, (name, title) in enumerate(MEASURES.items()):
        values, top = [row[name] for row in rows], index * (HEIGHT + GAP)
        highest = max(*values, 1e-9)
        step = (WIDTH - 80) / max(len(values) - 1, 1)
        places = [
            f"{60 + step * at:.1f},{top + GAP + HEIGHT * (1 - value / highest):.1f}" for at, value in enumerate(values)
        ]
        parts += [
            f'<text x="0" y="{top + GAP - 10}" font-weight="bold">{title}</text>',
            f'<text x="0" y="{top + GAP + 8}">{highest:g}</text><text x="0" y="{top + GAP + HEIGHT}">0</text>',
            f'<path d="M60 {top + GAP}V{top + GAP + HEIGHT}H{WIDTH}" stroke="#999" fill="none"/>',
            f'<polyline points="{" ".join(places)}" stroke="#1f6feb" stroke-width="2" fill="none"/>',
        ]
    height = len(MEASURES) * (HEIGHT + GAP) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 8} {height}" width="{WIDTH + 8}"'
        ' font-family="sans-serif" font-size="12" style="background:#fff">\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
