"""Scores of programs: the share of tests that the program in a response passes."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rlhf_core.errors import DataError
from rlhf_core.reward.sandbox import Asserts, InputOutput, Limits, Result, require_isolation, run_program

# A line of three backticks with the language, then everything up to the next line of three backticks, or the end.
_FENCED = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*\r?$|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py", "py3")


def code_scores(
    rows: Sequence[Mapping[str, Any]], *, limits: Limits, workers: int, allow_unisolated: bool
) -> tuple[np.ndarray, list[str]]:
    """Return the share of tests that each response's program passes, and how its first other test ended.

        score = tests passed / tests

    Args:
        rows: Each with sample_id, response (text) and ground_truth (see read_tests).
        limits: Of each run of a program; a program runs once for each test.
        workers: Programs at once. It changes nothing but the time, unless the machine is overloaded: `seconds` is time
            on the wall.
        allow_unisolated: See run_program.

    Returns:
        (scores [rows] float32 in [0, 1], kinds [rows]: one of sandbox.KINDS, or "no_code" for a response without any),
        in the order of rows.

    Raises:
        DataError: If a ground_truth is not one; names the row. Before any program runs.
        SandboxError: As run_program.
    """
    jobs = [(program(row["response"]), read_tests(row["ground_truth"], row["sample_id"])) for row in rows]
    require_isolation(limits, allow_unisolated=allow_unisolated)

    def run(job: tuple[str, list[InputOutput | Asserts]]) -> Result:
        source, tests = job
        if not source.strip():
            return Result(passed=0, total=len(tests), kind="no_code", output="")
        return run_program(source, tests, limits, allow_unisolated=allow_unisolated)

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(run, jobs))
    scores = np.array([result.passed / result.total for result in results], np.float32)
    return scores, [result.kind for result in results]


def program(response: str) -> str:
    """Return the program in a response: its last fenced block of Python, or the whole text when it has no fence.

    A block counts as Python when its fence names python, python3, py, py3 or no language. A block that is not closed
    goes to the end of the text. A response whose blocks are all in other languages has no program: "".
    """
    blocks = _FENCED.findall(response)
    if not blocks:
        return response
    python = [text for language, text in blocks if language.lower() in _PYTHON]
    return python[-1] if python else ""


def read_tests(ground_truth: Any, sample_id: str) -> list[InputOutput | Asserts]:
    """Return the tests that a ground_truth holds.

    It is {"tests": [test, ...]}, where a test is {"stdin": text, "stdout": text}, or assert statements as a string; or,
    for a single test, {"stdin": text, "stdout": text} itself.

    Raises:
        DataError: If it is anything else, or has no test; names the row.
    """
    single = isinstance(ground_truth, dict) and "tests" not in ground_truth
    tests = [ground_truth] if single else ground_truth.get("tests") if isinstance(ground_truth, dict) else None
    if not isinstance(tests, list) or not tests:
        raise DataError(
            f"sample {sample_id}: ground_truth is {str(ground_truth)[:200]}; a code reward needs"
            ' {"tests": [...]} with at least one test, or {"stdin": "...", "stdout": "..."}'
        )
    return [_test(test, number, sample_id) for number, test in enumerate(tests)]


def _test(test: Any, number: int, sample_id: str) -> InputOutput | Asserts:
    if isinstance(test, str):
        return Asserts(test)
    if isinstance(test, dict) and test.keys() == {"stdin", "stdout"}:
        stdin, stdout = test["stdin"], test["stdout"]
        if isinstance(stdin, str) and isinstance(stdout, str):
            return InputOutput(stdin, stdout)
    raise DataError(
        f"sample {sample_id}: test {number} of its ground_truth is {str(test)[:200]}; expected assert statements as a"
        ' string, or {"stdin": text, "stdout": text}'
    )
