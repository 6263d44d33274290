"""Garbage collection: off while a stage imports, on while it works, never over what was there before.

Mutations that must fail here: collection off in any process that imports stages; not turned on again in run_stage; the
state before forgotten.
"""

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.collection import importing

ROOT = Path(__file__).parents[2]
WATCH = """
import gc, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "rlhf_core.config":
            print("imports:", gc.isenabled(), flush=True)
        if name == "rlhf_core.stage":
            import rlhf_core.collection as collection
            start = collection.start_collecting
            collection.start_collecting = lambda: (start(), print("works:", gc.isenabled(), gc.get_freeze_count() > 0))
sys.meta_path.insert(0, Watch())
"""


def python(*command: str, path: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=path, capture_output=True, text=True)
    return done.stdout


def test_a_stage_imports_without_collecting_and_works_with_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    assert python("-m", "stages.validate", path=tmp_path).split() == ["imports:", "False", "works:", "True", "True"]


def test_who_imports_a_stage_keeps_collecting() -> None:
    assert python("-c", "import gc, stages; print(gc.isenabled())") == "True\n"


@pytest.mark.parametrize("enabled", [True, False])
def test_importing_leaves_collection_as_it_was(enabled: bool) -> None:
    before = gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ImportError), importing():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled and gc.get_freeze_count() > before
    finally:
        gc.enable()
        gc.unfreeze()
