"""One run of the whole graph, shared by the files of this folder that the same worker runs."""

from pathlib import Path

import pytest

from tests.pipeline.project import RESULTS, Repro, hashes, make_project, repro


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    """A small copy of the project. test_graph.py changes it step by step."""
    return make_project(tmp_path_factory.mktemp("pipeline") / "project", tiny_dir)


@pytest.fixture(scope="session")
def first(project: Path) -> tuple[Repro, dict[str, str]]:
    """The first run in it, and the hash of every file it made."""
    return repro(project), hashes(project, *RESULTS)
