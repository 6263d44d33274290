"""Walk from a checkpoint back to the data it came from, and compare every file with what is recorded of it.

Three records are compared with the bytes on disk: what an artifact's makers wrote beside it (lineage.json), what
dvc.lock says, and what those who read it wrote down when they did. The first tells damage from a change, the last tells
that an input was made again since.
"""

import hashlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.artifacts.lineage import LINEAGE, check_directory, read_lineage
from rlhf_core.artifacts.provenance import combined_hash, content_files
from rlhf_core.artifacts.shards import iter_tables, read_metadata
from rlhf_core.config import load_run
from rlhf_core.disk import size_text
from rlhf_core.errors import ArtifactError, StaleInput
from rlhf_core.report.dvc_lock import Lock, directory_md5, read_lock
from rlhf_core.report.metrics import main_chain
from rlhf_core.report.pruned import read_pruned

_CHECKPOINTS = ("policy", "critic", "optimizer")
_CHUNK = 2**20  # bytes read at once


@dataclass(frozen=True, slots=True)
class Found:
    """One artifact of the walk."""

    path: str  # relative to the project
    text: str  # what was found, for people
    digest: str | None  # SHA-256; None where it is missing
    inputs: dict[str, str | None]  # path -> SHA-256 that it recorded; None where only dvc.lock knows of the input


def default_targets(root: Path) -> list[str]:
    """Return the checkpoints of the main chain's last iteration that are there; without iterations the base model."""
    chain = main_chain(load_run(root))
    for name in [*reversed(chain), "0"]:
        paths = [f"data/checkpoints/{kind}/{name}" for kind in _CHECKPOINTS]
        if found := [path for path in paths if (root / path).exists()]:
            return found
    raise ArtifactError("data/checkpoints holds no checkpoint yet; run `dvc repro`")


def resolve(root: Path, target: str) -> str:
    """Return a target's path relative to the project.

    Args:
        root: Project directory.
        target: A path; policy/2 is short for data/checkpoints/policy/2; a shard stands for its artifact.

    Raises:
        ArtifactError: If dvc.lock does not know it and it does not exist.
    """
    lock = read_lock(root)
    for path in (Path(target), Path("data/checkpoints") / target):
        if path.suffix == ".parquet":
            path = path.parent
        name = path.as_posix()
        if path.is_absolute() and path.is_relative_to(root.resolve()):
            name = path.relative_to(root.resolve()).as_posix()
        if name in lock.outs or (root / name).exists():
            return name
    raise ArtifactError(f"{target}: no such artifact; give a path such as data/checkpoints/policy/1, or policy/1")


def verify(root: Path, targets: Sequence[str], *, allow_missing: bool) -> Iterator[Found]:
    """Yield every artifact that the targets were made from, they first, after it was found to be as recorded.

    Args:
        root: Project directory.
        targets: Paths relative to it.
        allow_missing: Whether an artifact that is not there is passed over, as a pruned checkpoint always is; what it
            was made from is then followed through dvc.lock.

    Raises:
        ArtifactError: At the first that is missing, damaged or edited, with file, expected and found hash, and what to
            do. StaleInput: At the first that is not the one its reader read.
    """
    lock, pruned, seen = read_lock(root), read_pruned(root), dict[str, Found]()
    queue: deque[tuple[str, str | None, str]] = deque((target, None, "") for target in targets)
    while queue:
        path, expected, reader = queue.popleft()
        if path not in seen:
            found = seen[path] = _examine(root, path, lock, pruned, allow_missing=allow_missing)
            yield found
            queue.extend((name, digest, path) for name, digest in found.inputs.items())
        digest = seen[path].digest
        if None not in (expected, digest) and digest != expected:
            raise StaleInput(
                f"{path}: {reader} was made from another one: expected sha256 {expected}, found {digest}. It was made"
                f" again or replaced since; `dvc repro` brings {reader} up to date"
            )


def _examine(root: Path, path: str, lock: Lock, pruned: Collection[str], *, allow_missing: bool) -> Found:
    """Check one artifact by itself: is it there, can it be read, is it what its maker and dvc.lock recorded?"""
    place, out = root / path, lock.outs.get(path)
    known = {name: None for name in (lock.stages.get(out.stage, {}) if out else {}) if _is_data(name)}
    if not place.exists():
        if not _is_ours(path, lock):
            return Found(path, "not in this project; not looked at", None, {})
        if path in pruned:
            return Found(path, "dropped by `rlhf prune`", None, dict(known))
        if not allow_missing:
            stage = out.stage if out else "the stage that writes it"
            raise ArtifactError(
                f"{path}: missing, so neither it nor what was made from it can be compared; `dvc repro {stage}` makes"
                " it again, `dvc pull` fetches it from a remote, --allow-missing goes on without it"
            )
        return Found(path, "missing", None, dict(known))
    digests = _digests(place)
    recorded = read_lineage(place) if place.is_dir() else None
    for name, (_, sha256) in (recorded["files"] if recorded else {}).items():
        if name in digests and digests[name][0] != sha256:
            raise _damaged(root, path, name, "sha256", sha256, digests[name][0], f"{LINEAGE} beside it", lock)
    _read(place)
    _compare_with_lock(root, path, lock, {name: both[1] for name, both in digests.items()})
    inputs: dict[str, str | None] = dict(known)
    if recorded:
        inputs |= recorded["inputs"]
    elif _is_sharded(place):
        inputs |= read_metadata(place).get("inputs", {})
    names = content_files(place) if place.is_dir() else [""]
    digest = combined_hash({name: digests[name][0] for name in names}) if place.is_dir() else digests[""][0]
    size = sum((place / name).stat().st_size for name in names)
    return Found(path, f"{len(names)} files, {size_text(size)}", digest, inputs)


def _read(place: Path) -> None:
    """Read an artifact as those who use it do: shards in full with their checks, of weights sizes and headers."""
    if _is_sharded(place):
        read_metadata(place)
        for _ in iter_tables(place):
            pass
    elif place.is_dir():
        check_directory(place)


def _is_sharded(place: Path) -> bool:
    return place.is_dir() and any(place.glob("part-*.parquet"))


def _is_data(path: str) -> bool:
    """Whether an input of a stage is data, not code or configuration."""
    return path.startswith("data/") and not path.startswith("data/.checks/")


def _is_ours(path: str, lock: Lock) -> bool:
    return path in lock.outs or _is_data(path)


def _digests(place: Path) -> dict[str, tuple[str, str]]:
    """(SHA-256, MD5) of every file by relative name, each read once; a file is one of no name."""
    if place.is_file():
        return {"": _both(place)}
    files = sorted(file for file in place.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(place).as_posix(): _both(file) for file in files}


def _both(path: Path) -> tuple[str, str]:
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            sha256.update(chunk)
            md5.update(chunk)
    return sha256.hexdigest(), md5.hexdigest()


def _compare_with_lock(root: Path, path: str, lock: Lock, found: dict[str, str]) -> None:
    """Compare an output with what DVC recorded when its stage ended; name the file where DVC's cache has the list."""
    out = lock.outs.get(path)
    if out is None:
        return
    whole = directory_md5(found) if (root / path).is_dir() else found[""]
    if whole == out.md5:
        return
    for name, md5 in (lock.files(out.md5) or {}).items():
        if found.get(name) != md5:
            raise _damaged(root, path, name, "md5", md5, found.get(name, "no file"), "dvc.lock", lock)
    raise _damaged(root, path, "", "md5", out.md5, whole, "dvc.lock", lock)


def _damaged(
    root: Path, path: str, name: str, kind: str, expected: str, found: str, record: str, lock: Lock
) -> ArtifactError:
    where = f"{path}/{name}" if name else path
    return ArtifactError(
        f"{where}: expected {kind} {expected} ({record}), found {found}: damaged or edited since it was written."
        f" {_remedy(root, path, name, lock)}"
    )


def _remedy(root: Path, path: str, name: str, lock: Lock) -> str:
    """What to do, by whether DVC's cache has a good copy, or is the same file by a hard link."""
    out = lock.outs.get(path)
    if out is None:
        return f"Delete {path} and run the stage that writes it"
    again = f"`dvc pull {path}` where there is a remote, else `dvc repro {out.stage}`"
    files = lock.files(out.md5) or {}
    kept = lock.object(files[name]) if name in files else None
    if kept is None or not kept.is_file():
        return f"Delete {path}, then {again}"
    if (root / path / name).exists() and kept.samefile(root / path / name):
        return f"DVC's cache has the same file by a hard link, so delete both, {path} and {kept}, then {again}"
    if _both(kept)[1] != files[name]:
        return f"Its copy in DVC's cache is damaged too: delete {path} and {kept}, then {again}"
    return f"Delete {path}, then `dvc checkout {path}` takes the good copy from DVC's cache"
