"""Imports go one way, and heavy packages stay where they belong."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.project import ROOT, imports, python_files

# Lower may not import higher. Packages of one floor may import each other, but not in a circle.
FLOORS = {
    "collection": 0,
    "disk": 0,
    "errors": 0,
    "seeding": 0,
    "config": 0,
    "environment": 0,
    "explain": 0,
    "ranges": 0,
    "reward_config": 0,
    "stage": 0,
    "text": 0,
    "artifacts": 1,
    "algorithms": 1,
    "models": 2,
    "ingest": 2,
    "sampling": 2,
    "reward": 2,
    "training": 2,
    "differences": 1,
    "report": 3,
    "presets": 3,
    "replay": 3,
    "cli": 3,
    "stages": 4,
}
NUMPY_HALF = (
    "advantages",
    "conventions",
    "estimates",
    "iteration",
    "kl",
    "mismatch",
    "moments",
    "off_policy",
    "ragged",
    "responses",
    "reward_state",
    "rewards",
    "shaping",
    "statistics",
    "whitening",
)
LIBRARIES = {
    # library -> where it may be imported
    "vllm": ["rlhf_core/sampling/"],
    "torch": [
        "rlhf_core/models/",
        "rlhf_core/training/",
        "rlhf_core/sampling/",
        "rlhf_core/reward/",
        "rlhf_core/environment.py",
        "rlhf_core/algorithms/aggregation.py",
        "rlhf_core/algorithms/losses.py",
        "rlhf_core/algorithms/diagnostics.py",
    ],
    "transformers": ["rlhf_core/models/", "rlhf_core/training/", "rlhf_core/ingest/"],
    "datasets": ["rlhf_core/ingest/"],
    "peft": ["rlhf_core/training/lora.py"],
    "httpx": ["rlhf_core/reward/service.py"],
    "pytest": [],
    "tests": [],
    "tools": [],
    "yaml": [],  # PyYAML reads 1e-5 as text; ruamel is what DVC uses
    "pickle": [],
}


def part(path: Path) -> str:
    """The package or module of FLOORS that a file belongs to."""
    return "stages" if path.parts[0] == "stages" else path.with_suffix("").parts[1]


def edges() -> list[tuple[str, str, str]]:
    """(from, to, where) of every import inside the project that crosses parts."""
    found = []
    for path in python_files("rlhf_core", "stages"):
        for line, name in imports(path):
            names = name.split(".")
            target = "stages" if names[0] == "stages" else names[1] if names[0] == "rlhf_core" else None
            if target is not None and path.name != "__init__.py" and (target != part(path) or target == "stages"):
                found.append((part(path), target, f"{path}:{line} imports {name}"))
    return found


def test_every_part_has_a_floor() -> None:
    parts = {part(path) for path in python_files("rlhf_core", "stages")} - {"__init__"}
    assert parts <= set(FLOORS)
    assert len(edges()) > 50


def test_no_import_goes_up_and_stages_do_not_import_each_other() -> None:
    wrong = [where for source, target, where in edges() if FLOORS[source] < FLOORS[target] or target == "stages"]
    assert not wrong, "\n".join(wrong)


def test_no_packages_import_each_other_in_a_circle() -> None:
    below = {name: {target for source, target, _ in edges() if source == name} for name in FLOORS}
    order: list[str] = []
    while ready := [name for name in below if name not in order and below[name] <= set(order)]:
        order += ready
    circle = {name: sorted(below[name] - set(order)) for name in below if name not in order}
    assert not circle, circle


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_is_imported_only_where_it_may_be(library: str) -> None:
    allowed = tuple(LIBRARIES[library])
    wrong = [
        f"{path}:{line}"
        for path in python_files("rlhf_core", "stages")
        for line, name in imports(path)
        if name.split(".")[0] == library and not (allowed and path.as_posix().startswith(allowed))
    ]
    assert not wrong


def test_core_maths_reads_no_files_and_no_configuration() -> None:
    forbidden = ("rlhf_core.config", "rlhf_core.artifacts", "pyarrow", "pathlib", "json", "os")
    wrong = [
        f"{path}:{line} imports {name}"
        for path in python_files("rlhf_core")
        if path.parts[1] == "algorithms"
        for line, name in imports(path)
        if name.startswith(forbidden)
    ]
    assert not wrong


def test_light_parts_load_no_torch() -> None:
    modules = [
        ".".join(path.with_suffix("").parts)
        for path in python_files("rlhf_core", "stages")
        if part(path) in ("artifacts", "report", "cli", "config", "disk", "errors", "seeding", "stage")
        or (part(path) == "algorithms" and path.stem in NUMPY_HALF)
        or path.as_posix() in ("stages/validate.py", "stages/advantages.py", "stages/report.py")
    ]
    modules = [name.removesuffix(".__init__") for name in modules]
    assert len(modules) > 15
    command = (
        f"import sys, {', '.join(modules)}\nprint([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
