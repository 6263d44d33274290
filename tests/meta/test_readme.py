"""What README and docs tell a reader to type or open exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.project import ROOT, project_files

PAGES = [path for path in project_files() if path.suffix == ".md"]
MAKE_TARGETS = set(re.findall(r"(?m)^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8")))


def text(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code(page: Path) -> str:
    """Everything in code blocks and in backticks."""
    content = text(page)
    blocks = re.findall(r"(?s)```[^\n]*\n(.*?)```", content)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"(?s)```.*?```", "", content))
    return "\n".join([*blocks, *inline])


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_make_targets_exist(page: Path) -> None:
    used = set(re.findall(r"(?m)\bmake ([a-z][\w-]*)", code(page)))
    assert used <= MAKE_TARGETS


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text(page))
    missing = [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_modules_and_source_files_exist(page: Path) -> None:
    modules = re.findall(r"python -m ((?:stages|rlhf_core|tools)[\w.]*)", code(page))
    missing = [m for m in modules if not (ROOT / (m.replace(".", "/") + ".py")).exists()]
    paths = re.findall(r"\b((?:rlhf_core|stages|tests|tools|docs|requirements)/[\w./-]+\.\w+)", code(page))
    missing += [p for p in paths if not (ROOT / p).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_stages_exist(page: Path) -> None:
    from rlhf_core.config import read_yaml

    stages = set(read_yaml(ROOT / "dvc.yaml")["stages"])
    used = re.findall(r"dvc repro (?:-\w+ |--[\w-]+ )*([a-z_]+)(?:@\w+)?", code(page))
    assert set(used) <= stages


def test_command_line_knows_what_the_pages_use() -> None:
    used = {name for page in PAGES for name in re.findall(r"\brlhf ([a-z]+)", code(page))}
    assert used
    for name in used:
        done = subprocess.run(
            [sys.executable, "-c", "from rlhf_core.cli import main; main()", name, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"rlhf {name}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_parameters_exist(page: Path) -> None:
    from rlhf_core.config import Params

    sections = {
        name: field.annotation
        for name, field in Params.model_fields.items()
        if hasattr(field.annotation, "model_fields")
    }
    pattern = rf"(?<![\w./])({'|'.join(sections)})\.([a-z_0-9]+)\b(?!\()"
    used = re.findall(pattern, code(page))
    known = {(name, key) for name, model in sections.items() for key in model.model_fields}  # type: ignore[union-attr]
    files = {("report", "html")}
    missing = {pair for pair in used if pair not in known | files and pair[1] not in ("py", "md", "json", "yaml")}
    assert not missing
