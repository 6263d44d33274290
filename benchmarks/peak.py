"""Run a module as a process of its own and tell its largest resident memory: `benchmarks.peak FILE MODULE ARGUMENTS`.

The kernel's own account of a child (ru_maxrss) begins with the memory of the process that forked it.
"""

import atexit
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the module; when the process ends, write the bytes into FILE."""
    file, module = sys.argv[1:3]
    atexit.register(lambda: Path(file).write_text(str(peak_bytes()), encoding="utf-8"))
    sys.argv = ["-m", *sys.argv[3:]]  # as Python itself begins with a module
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
