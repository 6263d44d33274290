"""Apply each one-line mutation of tests/mutations.py in turn, and show that some test fails: `make mutations`.

A mutation lives in the memory of a forked process only; no file is changed. The fork inherits torch and pytest already
imported, so one mutation costs seconds. Exit code 0: every mutation was noticed, and the tests pass without any.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; a fork of a process with busy threads may hang

import importlib.machinery
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import beartype  # noqa: F401 - imported once here instead of in every fork
import hypothesis  # noqa: F401
import numba  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
PROCESSES = max(1, min(os.cpu_count() or 1, 4))
NOTICED, UNNOTICED = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK


def mutated(mutation: Mutation, source: str) -> str:
    """Return the source with the mutation's text replaced.

    Raises:
        ValueError: If the text does not stand there exactly once.
    """
    count = source.count(mutation.before)
    if count != 1:
        raise ValueError(f"{mutation.file}: expected {mutation.before!r} once, found it {count} times")
    return source.replace(mutation.before, mutation.after)


def become(mutation: Mutation | None, tests: tuple[str, ...], log: Path) -> int:
    """In a forked process: import the project with the mutation in it, run the tests, return pytest's exit code."""
    sys.dont_write_bytecode = True
    sys.pycache_prefix = str(log.with_suffix(".pycache"))  # else the unchanged module's bytecode would be loaded
    if mutation is not None:
        path = str(ROOT / mutation.file)
        source = mutated(mutation, Path(path).read_text(encoding="utf-8")).encode()
        original = importlib.machinery.SourceFileLoader.get_data

        def get_data(self: importlib.machinery.SourceFileLoader, name: str) -> bytes:
            return source if name == path else original(self, name)

        importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    with log.open("w") as handle:
        os.dup2(handle.fileno(), 1)
        os.dup2(handle.fileno(), 2)
        return int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", *tests]))


def start(mutation: Mutation | None, tests: tuple[str, ...], log: Path) -> int:
    """Fork, and return the child's process number."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = become(mutation, tests, log)
        finally:
            os._exit(code)
    return child


def run(work: Path) -> list[str]:
    """Run all, a few at a time, and return what is wrong: mutations that no test noticed, and broken runs."""
    for mutation in MUTATIONS:
        mutated(mutation, (ROOT / mutation.file).read_text(encoding="utf-8"))  # all still stand where they stood
    every_test = tuple(sorted({test for mutation in MUTATIONS for test in mutation.tests}))
    waiting: list[tuple[Mutation | None, tuple[str, ...]]] = [(None, every_test)]
    waiting += [(mutation, mutation.tests) for mutation in MUTATIONS]
    running: dict[int, tuple[Mutation | None, Path, float]] = {}
    problems = []
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            mutation, tests = waiting.pop(0)
            log = work / f"{len(waiting)}.log"
            running[start(mutation, tests, log)] = (mutation, log, time.monotonic())
        child, status = os.wait()
        mutation, log, began = running.pop(child)
        code = os.waitstatus_to_exitcode(status)
        wanted = UNNOTICED if mutation is None else NOTICED
        name = "no mutation" if mutation is None else f"{mutation.file}: {mutation.before.strip()} -> {mutation.after}"
        print(f"{'ok' if code == wanted else 'WRONG':5} {time.monotonic() - began:5.1f} s  {name}", flush=True)
        if code != wanted:
            problems.append(f"{name}: pytest ended with {code}\n{log.read_text()[-3000:]}")
    return problems


def main() -> None:
    """Print a line for each mutation, and what went wrong at the end."""
    os.chdir(ROOT)
    began = time.monotonic()
    with TemporaryDirectory() as work:
        problems = run(Path(work))
    print(f"{len(MUTATIONS)} mutations, {len(problems)} problems, {time.monotonic() - began:.0f} s")
    if problems:
        sys.exit("\n\n".join(problems))


if __name__ == "__main__":
    main()
