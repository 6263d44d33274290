"""Shared by the tests of stages: a run of the tiny model that is about to be scored."""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    """What tests/tiny_run.py builds. Shared: do not write into it."""
    from tests.tiny_run import build

    root = tmp_path_factory.mktemp("made_run")
    with contextlib.chdir(root):
        build(tiny_dir)
    return root


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_run: Path) -> Path:
    """A copy of it, which is the working directory."""
    root = shutil.copytree(made_run, tmp_path / "project")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def function(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Write the body of user_rewards/mine.py: a function f of rows."""
    for name in [name for name in sys.modules if name.split(".")[0] == "user_rewards"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path("user_rewards").mkdir()
    Path("user_rewards/__init__.py").write_text("")

    def write(body: str) -> None:
        Path("user_rewards/mine.py").write_text(f"def f(rows):\n    {body}\n")
        for name in [name for name in sys.modules if name.split(".")[0] == "user_rewards"]:
            del sys.modules[name]

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "user_rewards"]:
        del sys.modules[name]
