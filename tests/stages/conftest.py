"""Shared by the tests of stages: a run of the tiny model that is about to be scored."""

import contextlib
import shutil
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
