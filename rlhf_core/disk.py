"""What the disk refuses, as errors of ours: no room, a quota, a file-size limit, no permission, a broken device.

Room is also checked before long work starts, from an estimate of what the work will write.
"""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.errors import DiskError

_GO_ON = "then run the same command again: finished parts are kept, and nothing half-written was published"
_PROBLEMS = {
    errno.ENOSPC: f"the disk is full; free some space (`rlhf prune`, `dvc gc -w`), {_GO_ON}",
    errno.EDQUOT: f"the disk quota is used up; free some space (`rlhf prune`, `dvc gc -w`) or raise it, {_GO_ON}",
    errno.EFBIG: f"the file would pass the limit on file sizes (`ulimit -f`, or the file system's); raise it, {_GO_ON}",
    errno.EROFS: "the file system is mounted read-only; mount it for writing, or work in another directory",
    errno.EACCES: "no permission; make it readable and writable for this user",
    errno.EPERM: "the operation is not permitted here; look at owner, mode and mount options of the directory",
    errno.EIO: "the device reports an input/output error; look at the kernel's log (`dmesg`) before you go on",
    errno.EXDEV: "source and target are on different file systems; .work and data must be on one (links included)",
}
# Rust libraries (safetensors, tokenizers) put the number into their text; numpy's tofile tells only what was missing.
_IN_TEXT = re.compile(r"\(os error (\d+)\)")
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")


def disk_error(error: BaseException, path: Path | None = None, *, needed: int | None = None) -> DiskError | None:
    """Return what a failed operation says in our words, or None when the disk is not the cause.

    Args:
        error: As raised by Python, pyarrow, numpy or safetensors.
        path: What was being written; None = as the error tells.
        needed: Bytes that were to be written, where known.
    """
    text = str(error)
    number = getattr(error, "errno", None)
    if number is None and (found := _IN_TEXT.search(text)):
        number = int(found[1])
    if number is None and isinstance(error, OSError) and _SHORT_WRITE.search(text):
        number = errno.ENOSPC
    if number not in _PROBLEMS:
        return None
    name = getattr(error, "filename", None)
    where = path or (Path(str(name)) if name else None)
    room = ""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        wanted = f"{size_text(needed)} needed, " if needed is not None else ""
        room = f" ({wanted}{size_text(free_bytes(where or Path('.')))} free)"
    return DiskError(f"{where or 'a file'}: cannot be written{room}: {_PROBLEMS[number]}")


@contextmanager
def writing(temporary: Path, *, needed: int | None = None) -> Iterator[None]:
    """Remove an unfinished file when its write fails, and say so when it was the disk.

    Args:
        temporary: The file or directory that is written; what is whole is renamed afterwards.
        needed: Bytes that it will take, where known.

    Raises:
        DiskError: With needed and free bytes.
    """
    try:
        yield
    except OSError as error:
        problem = disk_error(error, temporary, needed=needed)
        temporary.unlink(missing_ok=True)
        if problem is None:
            raise
        raise problem from None


def require_space(directory: Path, needed: int, what: str) -> None:
    """Check before long work that its result will fit.

    Args:
        directory: Where it goes; it need not exist yet.
        needed: Estimate, bytes.
        what: What will be written, for the message.

    Raises:
        DiskError: With needed and free bytes.
    """
    free = free_bytes(directory)
    if free < needed:
        raise DiskError(
            f"{directory}: {what} takes about {size_text(needed)}, {size_text(free)} are free; free some space (`rlhf"
            " prune` drops old checkpoints, `dvc gc -w` what no stage refers to any more), then run again"
        )


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that a path is or will be on."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def directory_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory; 0 when there is nothing."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def size_text(count: float) -> str:
    """Return a number of bytes for people, exact below 10 KiB, such as 9000 bytes or 1.5 GiB."""
    if count < 10 * 2**10:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 2**10
        if count < 2**10:
            return f"{count:.1f} {unit}"
    return f"{count / 2**10:.1f} TiB"
