"""Run an iteration again in a temporary copy and compare every byte: `rlhf replay 2`.

The copy holds links to the inputs and directories of its own for the outs. Every stage gets the recorded outs of the
stages before it, so a stage that does not repeat itself is named, and those that only follow from it are not blamed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.config import BASE_ITERATION, load_run, read_yaml
from rlhf_core.differences import Difference, file_differences
from rlhf_core.environment import differences, environment_path
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.text import printable

STAGES = ("rollout", "score", "advantages", "ppo_update", "evaluate")
# Floats of a GPU's outs may differ by this much: kernels may sum in another order each time.
GPU_TOLERANCE = 0.05
SHOWN = 12  # parts that differ, of one stage
_LEFT_OUT = (".git", ".dvc", ".work", ".venv")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage repeated itself."""

    stage: str
    outs: int  # files and directories compared
    changed: tuple[str, ...]  # outs whose bytes differ
    differences: tuple[Difference, ...]  # in them, the first of each file
    environment: tuple[str, ...]  # what the stage ran on then and now, where it differs
    gpu: bool  # whether it saw one now


def run_again(
    root: Path,
    iteration: str,
    stages: Sequence[str],
    *,
    tolerance: float | None,
    keep: bool,
    tell: Callable[[str], Any],
) -> bool:
    """Replay an iteration in a directory below .work and tell how each stage did.

    Args:
        root: Project directory; nothing in it but .work is written.
        iteration: Its name.
        stages: Which, of STAGES.
        tolerance: As for within.
        keep: Whether the directory stays.
        tell: Called with text for a person.

    Returns:
        Whether all stages repeated themselves, within the tolerance.

    Raises:
        RlhfError: As check and replay; also when parameters, code or inputs are no longer those of the recorded run.
    """
    check(root, iteration, stages)
    if stale := changed_since(root, iteration, stages):
        raise RlhfError(f"{', '.join(stale)}: changed since it ran; run `dvc repro` first, then replay")
    work = root.resolve() / ".work"
    work.mkdir(exist_ok=True)
    copy = Path(tempfile.mkdtemp(prefix=f"replay-{iteration}-", dir=work))
    try:
        outcomes = replay(root.resolve(), iteration, stages, copy, lambda one: tell(described(one, tolerance)))
    finally:
        if not keep:
            shutil.rmtree(copy)
    worse = [outcome.stage for outcome in outcomes if not within(outcome, tolerance)]
    if keep:
        tell(f"the copy is in {copy}")
    if worse:
        tell(f"{worse[0]} is the first stage that does not repeat itself")
    return not worse


def replay(
    root: Path, iteration: str, stages: Sequence[str], copy: Path, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run stages of an iteration again and compare their outs with the recorded ones.

    Args:
        root: Project directory; nothing in it is written.
        iteration: Its name.
        stages: Which, of STAGES.
        copy: An empty directory, in which they run.
        report: Told of every stage as soon as it is compared.

    Raises:
        RlhfError: If a stage fails.
    """
    prev = load_run(root).iterations[iteration].prev
    recorded = {stage: stage_outs(root, stage, iteration) for stage in stages}
    mirror(root, copy, [path for paths in recorded.values() for path in paths])
    outcomes = []
    for stage in stages:
        run(stage, iteration, prev, copy)
        outcome = compare(root, copy, f"{stage}@{iteration}", recorded[stage])
        outcomes.append(outcome)
        report(outcome)
        for path in recorded[stage]:  # what follows gets the recorded outs
            if path.as_posix() in outcome.changed:
                os.replace(copy / path, copy / path.with_name(f"{path.name}.replayed"))
                (copy / path).symlink_to((root / path).resolve())
    return outcomes


def check(root: Path, iteration: str, stages: Sequence[str]) -> None:
    """Check that the iteration and its stages exist and have run.

    Raises:
        RlhfError: Naming what does not.
    """
    iterations = load_run(root).iterations
    if iteration == BASE_ITERATION or iteration not in iterations:
        raise ConfigError(f"replay {iteration}: no such iteration; expected one of {', '.join(iterations) or 'none'}")
    for stage in stages:
        if stage not in STAGES:
            raise ConfigError(f"replay --stages {stage}: expected some of {', '.join(STAGES)}")
        for path in stage_outs(root, stage, iteration):
            if not (root / path).exists():
                raise RlhfError(f"{path}: not there; run `dvc repro {stage}@{iteration}`, or get it with `dvc pull`")


def stage_outs(root: Path, stage: str, iteration: str) -> list[Path]:
    """Return the outs, metrics and plots of an iteration's stage, as dvc.yaml names them."""
    body = read_yaml(root / "dvc.yaml")["stages"][stage]["do"]
    entries = [entry for key in ("outs", "metrics", "plots") for entry in body.get(key, [])]
    names = [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]
    return [Path(name.replace("${key}", iteration)) for name in names]


def mirror(root: Path, copy: Path, outs: Sequence[Path]) -> None:
    """Fill a directory with links to all of a project but these outs; their directories are made, not linked."""
    made = {parent for path in outs for parent in path.parents}

    def link(directory: Path) -> None:
        (copy / directory).mkdir(exist_ok=True)
        for path in sorted((root / directory).iterdir()):
            inside = directory / path.name
            if inside in made and path.is_dir():
                link(inside)
            elif inside not in outs and path.name not in _LEFT_OUT:
                (copy / inside).symlink_to(path.resolve())

    link(Path())


def run(stage: str, iteration: str, prev: str, copy: Path) -> None:
    """Run one stage as dvc would, in the copy.

    Raises:
        RlhfError: If it fails; what it said is on the terminal.
    """
    command = read_yaml(copy / "dvc.yaml")["stages"][stage]["do"]["cmd"]
    command = command.replace("${key}", iteration).replace("${item.prev}", prev)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PYTHONPATH": str(copy), "PATH": path}
    if code := subprocess.run(command, cwd=copy, env=environment, shell=True, check=False).returncode:
        raise RlhfError(f"{stage}@{iteration} ended with exit code {code} when it was replayed, in {copy}")


def compare(root: Path, copy: Path, stage: str, outs: Sequence[Path]) -> Outcome:
    """Compare a stage's outs with the recorded ones: hashes first, and where they differ, what is in the files."""
    changed, found = [], []
    for path in outs:
        if not (copy / path).exists():
            changed.append(path.as_posix())
            found.append(Difference(path.as_posix(), "", "was not written", None))
        elif hash_path(root / path) != hash_path(copy / path):
            changed.append(path.as_posix())
            found += _in_out(root, copy, path)
    before, now = (_read(where / environment_path(stage)) for where in (root, copy))
    told = tuple(differences(before, now)) if before is not None and now is not None else ()
    if before is None:
        told = ("unknown for the recorded run: it ran elsewhere, and came from a cache",)
    gpu = bool(((now or {}).get("torch") or {}).get("gpus"))
    return Outcome(stage, len(outs), tuple(changed), tuple(found), told, gpu)


def within(outcome: Outcome, tolerance: float | None) -> bool:
    """Tell whether all that differs are floats, by no more than the tolerance (None: 0, and GPU_TOLERANCE on a GPU)."""
    allowed = tolerance if tolerance is not None else GPU_TOLERANCE if outcome.gpu else 0.0
    return all(item.largest is not None and item.largest <= allowed for item in outcome.differences)


def described(outcome: Outcome, tolerance: float | None) -> str:
    """Return what to tell a person about a stage: one line, then the first parts that differ, then the machine's."""
    if not outcome.changed:
        lines = [f"{outcome.stage}: {outcome.outs} outs, the same bytes"]
    else:
        bound = tolerance if tolerance is not None else GPU_TOLERANCE
        verdict = f"differ by at most {bound:g}, which is allowed" if within(outcome, tolerance) else "DIFFER"
        lines = [f"{outcome.stage}: {len(outcome.changed)} of {outcome.outs} outs {verdict}"]
    lines += [f"  {item.file} {item.part} {item.text}" for item in outcome.differences[:SHOWN]]
    if len(outcome.differences) > SHOWN:
        lines.append(f"  and {len(outcome.differences) - SHOWN} more parts")
    return printable("\n".join([*lines, *(f"  environment: {line}" for line in outcome.environment)]), keep="\n")


def changed_since(root: Path, iteration: str, stages: Sequence[str]) -> list[str]:
    """Return the stages whose inputs, parameters or code are no longer those of the recorded run.

    Raises:
        RlhfError: If dvc cannot tell.
    """
    targets = [f"{stage}@{iteration}" for stage in stages]
    command = [sys.executable, "-m", "dvc", "status", "--json", *targets]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RlhfError(f"dvc status failed: {found.stderr.strip()}")
    return sorted(json.loads(found.stdout))


def _in_out(root: Path, copy: Path, out: Path) -> list[Difference]:
    def names(base: Path) -> set[Path]:
        if base.is_file():
            return {Path()}
        return {path.relative_to(base) for path in base.rglob("*") if path.is_file()}

    one, other = names(root / out), names(copy / out)
    found = [
        Difference((out / name).as_posix(), "", "is there only once", None)
        for name in sorted(one ^ other)
        if not name.name.startswith(".")
    ]
    for name in sorted(one & other):
        found += file_differences(root / out / name, copy / out / name, (out / name).as_posix())
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
