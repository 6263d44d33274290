"""Shared by all tests: shapes checked at run time, repeatable hypothesis, a tiny model, and real data where it is."""

import os

# Before torch is imported, and inherited by every process that a test starts. The models are tiny: one thread does, and
# two processes with two spinning threads each on two cores are ten times slower than two with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

# Before any test imports these modules: every call then checks the shapes and dtypes of its arrays.
install_import_hook("rlhf_core.algorithms", "beartype.beartype")

hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with the tiny random model and its tokenizer. Shared: do not write into it."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory of public data sets that some tests read: RLHF_TEST_DATA, or one beside the repository."""
    named = os.environ.get("RLHF_TEST_DATA")
    path = Path(named) if named else Path(__file__).parents[1] / "../shared/data"
    if not path.is_dir():
        pytest.skip(f"no public data sets at {path}; set RLHF_TEST_DATA to a directory that holds them")
    return path.resolve()
