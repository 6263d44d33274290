"""Scores of programs.

Mutations that must fail here: pass or fail instead of the share of tests; the first block instead of the last; results
in the order in which programs end; a wrong ground truth scores 0.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.errors import DataError
from rlhf_core.reward.code import code_scores, program, read_tests
from rlhf_core.reward.sandbox import Asserts, InputOutput, Limits, missing_layers

LIMITS = Limits(seconds=5.0, memory_mb=256, disk_mb=4, processes=4, output_kb=64)


@pytest.fixture
def isolated() -> None:
    """Only where the platform has all layers."""
    if missing_layers():
        pytest.skip(f"this platform lacks isolation of {', '.join(missing_layers())}")


def scores(rows: list[tuple[str, Any]], *, limits: Limits = LIMITS, workers: int = 2) -> tuple[list[float], list[str]]:
    """Scores and kinds of (response, ground_truth) pairs."""
    given = [
        {"sample_id": f"1-p{n}-0", "response": text, "ground_truth": truth} for n, (text, truth) in enumerate(rows)
    ]
    found, kinds = code_scores(given, limits=limits, workers=workers, allow_unisolated=False)
    assert found.dtype == np.float32
    return found.tolist(), kinds


# The running sums of all integers on standard input, on one line. Each program has the errors of the next one, and one
# more; each test shows one error.
TESTS = {
    "tests": [
        {"stdin": "1 2 3\n", "stdout": "1 3 6"},  # none
        {"stdin": "5 -2 4\n", "stdout": "5 3 7"},  # negative numbers
        {"stdin": "1 2\n3 4\n", "stdout": "1 3 6 10"},  # several lines
        {"stdin": "\n", "stdout": ""},  # no numbers
    ]
}
NO_ERROR = """Every number is added to what came before:

```python
import sys
words = sys.stdin.read().split()
total, sums = 0, []
for word in words:
    total += int(word)
    sums.append(total)
print(*sums)
```
"""
ONE_ERROR = NO_ERROR.replace("total, sums = 0, []", "total, sums = int(words[0]), []").replace(
    "    total += int(word)\n    sums.append(total)\n",
    "    sums.append(total)\n    total += int(words[len(sums)]) if len(sums) < len(words) else 0\n",
)
TWO_ERRORS = ONE_ERROR.replace("sys.stdin.read()", "sys.stdin.readline()")
THREE_ERRORS = TWO_ERRORS.replace("int(words[len(sums)])", "abs(int(words[len(sums)]))")


@pytest.mark.usefixtures("isolated")
def test_programs_with_fewer_errors_score_higher() -> None:
    responses = [THREE_ERRORS, TWO_ERRORS, ONE_ERROR, NO_ERROR]
    found, kinds = scores([(response, TESTS) for response in responses])
    assert found == [0.25, 0.5, 0.75, 1.0]
    assert kinds == ["wrong", "wrong", "error", "ok"]


@pytest.mark.usefixtures("isolated")
def test_each_row_gets_its_own_result_however_long_others_take() -> None:
    rows: list[tuple[str, Any]] = [
        ("import time; time.sleep(0.5); print(1)", {"stdin": "", "stdout": "1"}),
        ("print(1)", {"stdin": "", "stdout": "1"}),
        ("print(2)", {"stdin": "", "stdout": "1"}),
        ("```java\nclass X {}\n```", {"stdin": "", "stdout": "1"}),
        ("  ", {"tests": ["assert True", "assert True"]}),
        ("I think that the answer is 1.", {"stdin": "", "stdout": "1"}),
        ("while True: pass", {"stdin": "", "stdout": "1"}),
        ("x = [0] * 10**9", {"stdin": "", "stdout": "1"}),
    ]
    limits = Limits(seconds=2.5, memory_mb=256, disk_mb=4, processes=4, output_kb=64)
    expected = ["ok", "ok", "wrong", "no_code", "no_code", "error", "timeout", "memory"]
    for workers in (1, 3):
        found, kinds = scores(rows, limits=limits, workers=workers)
        assert kinds == expected
        assert found == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_no_rows_have_no_scores() -> None:
    found, kinds = code_scores([], limits=LIMITS, workers=2, allow_unisolated=True)
    assert found.shape == (0,) and kinds == []


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nBetter:\n```Python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\n```", ""),
        ("```c\nint x;\n```", ""),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("```python title='a'\nx = 1\n```", "x = 1\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("Use `x` and ```y``` here.", "Use `x` and ```y``` here."),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block_of_python_or_the_whole_text(response: str, expected: str) -> None:
    assert program(response) == expected


def test_tests_a_ground_truth() -> None:
    pair = {"stdin": "1\n", "stdout": "2\n"}
    assert read_tests(pair, "1-p0-0") == [InputOutput("1\n", "2\n")]
    assert read_tests({"tests": [pair, "assert f(1) == 2"]}, "1-p0-0") == [
        InputOutput("1\n", "2\n"),
        Asserts("assert f(1) == 2"),
    ]


@pytest.mark.parametrize(
    "truth",
    [
        None,
        "assert True",
        {},
        {"tests": []},
        {"tests": "assert True"},
        {"tests": [1]},
        {"tests": ["assert True", {"stdin": "1"}]},
        {"stdin": "1"},
        {"stdin": ["1"], "stdout": ["2"]},
        {"stdin": "1", "stdout": 2},
        {"stdin": "1", "stdout": "2", "timeout": 3},
    ],
)
def test_a_wrong_ground_truth_is_named_with_its_row(truth: Any) -> None:
    rows = [
        {"sample_id": "1-p0-0", "response": "print(1)", "ground_truth": {"stdin": "", "stdout": "1"}},
        {"sample_id": "1-p3-0", "response": "print(1)", "ground_truth": truth},
    ]
    with pytest.raises(DataError, match=r"sample 1-p3-0: (ground_truth|test \d of its ground_truth) is .*"):
        code_scores(rows, limits=LIMITS, workers=1, allow_unisolated=False)


@pytest.mark.usefixtures("isolated")
def test_humaneval_solutions_pass_their_tests_and_broken_ones_do_not(real_data: Path) -> None:
    with gzip.open(real_data / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file][::9]
    truths = [{"tests": [f"{problem['test']}\ncheck({problem['entry_point']})"]} for problem in problems]
    solutions = [problem["prompt"] + problem["canonical_solution"] for problem in problems]
    broken = [problem["prompt"] + "    return None\n" for problem in problems]
    assert 10 < len(problems) <= 20
    assert scores(list(zip(solutions, truths, strict=True))) == ([1.0] * len(problems), ["ok"] * len(problems))
    found, kinds = scores(list(zip(broken, truths, strict=True)))
    assert found == [0.0] * len(problems) and set(kinds) <= {"wrong", "error"}
