"""What every stage does around its work: one writer at a time, die with dvc, resume, publish, speak plainly.

A stage writes into `.work/<stage>/<fingerprint>/`, outside its outs, because DVC deletes outs before each run. The
fingerprint covers inputs, parameters and code, so partial work of another configuration is never continued. Finished
files are renamed into the out directory at the end.
"""

import ctypes
import fcntl
import gc
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.collection import start_collecting
from rlhf_core.disk import disk_error, writing
from rlhf_core.environment import environment, environment_path
from rlhf_core.errors import RlhfError
from rlhf_core.text import printable

logger = logging.getLogger("rlhf")

_PR_SET_PDEATHSIG = 1
# Seconds. Where several processes train together, most errors stop them all: the main one says so and the launcher ends
# the others, well within this time. One that is still there afterwards stopped for a reason of its own, and says it.
_GRACE = 10
# Environment variable: process id of the launcher that rlhf_core/training/distributed.py started.
LAUNCHER = "RLHF_LAUNCHER"


def run_stage(name: str, main: Callable[[], None]) -> None:
    """Run a stage's main as the process's only work: set-up, lock, and errors as text instead of tracebacks.

    Of several processes that a launcher started (docs/distributed.md), the main one (RANK 0) takes the lock and
    cleans up.

    Args:
        name: The stage with its iteration, such as "rollout@2".
        main: Does the work; reads its arguments by itself.
    """
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Inert(f"%(asctime)s {name} %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.ERROR if rank else logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    die_with_parent()
    start_collecting()
    try:
        if rank:
            main()
            return
        with exclusive(name):
            main()
            write_json(environment_path(name), environment())
            for finished in work_root(name).glob("*/"):
                shutil.rmtree(finished)  # partial work is for resuming; what is finished is published
    except (RlhfError, OSError) as raised:
        error = raised if isinstance(raised, RlhfError) else disk_error(raised)
        if error is None:
            raise
        if rank:
            time.sleep(_GRACE)
        process = f"process {rank}: " if rank else ""
        print(f"\n{process}{type(error).__name__}: {printable(str(error), keep=chr(10))}", file=sys.stderr)
        sys.exit(1)
    finally:
        gc.freeze()  # the process ends, in half a second instead of three


class _Inert(logging.Formatter):
    """Log lines that quote data (a response, a file name) and cannot steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent (dvc, or a launcher) dies, so that no orphan goes on writing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        sys.exit("the launcher of this process has died")  # while Python was starting, so no signal came


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the stage's lock; the kernel releases it when the process ends, however it ends.

    Raises:
        RlhfError: If another process runs the same stage in this directory.
    """
    path = work_root(name) / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            raise RlhfError(
                f"{name} is already running here (process {owner}, lock {path}); wait for it or stop it"
            ) from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


def work_root(name: str) -> Path:
    """Directory for the unfinished work of one stage."""
    return Path(".work") / name.replace("@", "-")


def work_directory(name: str, fingerprint: dict[str, Any]) -> Path:
    """Return the directory of partial work for exactly these inputs, parameters and code, removing any other.

    Args:
        name: The stage with its iteration.
        fingerprint: Inputs and parameters that the result depends on, as JSON values. The code is added here: all of
            it, since a change anywhere may change the result, and resuming is worth less than being right.
    """
    root = work_root(name)
    described = {"fingerprint": fingerprint, "code": _code_hash()}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    directory = root / digest
    for other in root.iterdir() if root.exists() else ():
        if other.is_dir() and other != directory:
            logger.info("removing partial work of another configuration: %s", other)
            shutil.rmtree(other)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def publish(finished: Path, out: Path) -> None:
    """Move a finished file or directory to its place with one rename, replacing what is there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_dir():
        shutil.rmtree(out)
    os.replace(finished, out)
    fsync_directory(out.parent)


def fsync_directory(directory: Path) -> None:
    """Make a rename in this directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all: temporary name, fsync, rename."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(temporary, needed=len(text.encode())), temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def _code_hash() -> str:
    """Hash of this project's library and stages."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root.parent / "stages").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
