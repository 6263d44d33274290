"""What running and killed processes left behind: locks of stages and of DVC, and partial work with its size."""

import fcntl
import json
from pathlib import Path

from rlhf_core.disk import directory_bytes, size_text
from rlhf_core.report.check import Check


def lock_checks(root: Path) -> list[Check]:
    """Return findings about stages that run now, partial work, and DVC's own lock."""
    running = [lock.parent for lock in sorted((root / ".work").glob("*/lock")) if _held(lock)]
    checks = [
        Check(
            "stages",
            "warning",
            f"{work.name} is running here (process {_text(work / 'lock')}); wait for it or stop it",
        )
        for work in running
    ]
    return [
        *(checks or [Check("stages", "ok", "none is running")]),
        _partial_work(root, running),
        _dvc_lock(root / ".dvc/tmp/rwlock"),
    ]


def _partial_work(root: Path, running: list[Path]) -> Check:
    """Work of stages that were stopped, which they go on from."""
    stopped = sorted({path.parent for path in (root / ".work").glob("*/*/")} - set(running))
    if not stopped:
        return Check("partial work", "ok", "none")
    named = ", ".join(f"{path.name} ({size_text(directory_bytes(path))})" for path in stopped)
    return Check(
        "partial work",
        "ok",
        f"{named}; `dvc repro` goes on from it where inputs, parameters and code are still the same; to free the space"
        f" instead, delete it in {root / '.work'}",
    )


def _dvc_lock(path: Path) -> Check:
    """DVC notes the process ids of readers and writers in rwlock; after a kill, another process may have that id."""
    if not path.is_file() or path.stat().st_size == 0:
        return Check("DVC lock", "ok", "free")
    remedy = f"make sure that no dvc runs in this directory, then delete {path}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = [entry for section in ("read", "write") for entry in content.get(section, {}).values()]
        owners = {int(one["pid"]) for entry in entries for one in (entry if isinstance(entry, list) else [entry])}
    except (ValueError, AttributeError, KeyError, TypeError):
        return Check("DVC lock", "error", f"{path} is damaged (cut short by a kill or a full disk); {remedy}")
    commands = {pid: command for pid in sorted(owners) if (command := _command(pid)) is not None}
    others = {pid: words for pid, words in commands.items() if not any(Path(word).name == "dvc" for word in words)}
    if others:
        named = ", ".join(f"{pid} ({' '.join(words)[:60] or 'another program'})" for pid, words in others.items())
        return Check(
            "DVC lock",
            "error",
            f"names process {named}, which is no dvc: a killed one's number was used again, and DVC would wait for it;"
            f" {remedy}",
        )
    if commands:
        return Check("DVC lock", "warning", f"held by dvc, process {', '.join(map(str, commands))}; wait for it")
    return Check("DVC lock", "ok", "free" if not owners else "left by a process that has ended; DVC clears it")


def _command(pid: int) -> list[str] | None:
    """The words of a living process's command line; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:
        return []
    return text.strip("\0").split("\0")


def _held(lock: Path) -> bool:
    """Whether another process holds the lock; it is let go at once if not."""
    with lock.open("r") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def _text(lock: Path) -> str:
    return lock.read_text(encoding="utf-8").strip() or "unknown"
