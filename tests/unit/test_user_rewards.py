"""Functions in user_rewards/: found, called, and named with the row when they fail; and the example that we ship.

Mutations that must fail here: a failing function's rows not looked at one by one; rows handed over uncopied; the check
of the number of scores, or of a boolean, dropped.
"""

import importlib
import sys

import numpy as np
import pytest

from rlhf_core.errors import AnswerError, ConfigError, RewardError
from rlhf_core.reward.rows import checked_scores
from rlhf_core.reward.user_function import call_function, load_function
from user_rewards.example import mentions_the_question

WHERE = "reward source x, part-0"
ROWS = [{"sample_id": f"1-p{index}-0", "response": text} for index, text in enumerate(["a", "", "c"])]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write modules of a user_rewards/ of our own, which is then the one that is found."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "user_rewards"}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "user_rewards").mkdir()
    (tmp_path / "user_rewards/__init__.py").write_text("")

    def write(name: str, text: str) -> None:
        (tmp_path / f"user_rewards/{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "user_rewards"]:
        del sys.modules[name]


def test_a_function_is_found_by_module_and_name(write):
    write("helper", "ONE = 1.0\n")
    write("mine", "from user_rewards.helper import ONE\n\ndef f(rows):\n    return [ONE for row in rows]\n")
    assert load_function("mine:f")(ROWS) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "text, function, words",
    [
        ("def g(rows): pass\n", "mine:f", "has no function f; it has g"),
        ("f = 3\n", "mine:f", "has no function f; it has none"),
        ("def f(rows): pass\n", "other:f", "importing other from user_rewards/ failed: ModuleNotFoundError"),
        ("import nowhere_at_all\n", "mine:f", r"ModuleNotFoundError.*nowhere_at_all.*\(mine.py, line 1\)"),
        ("def f(rows)\n", "mine:f", "SyntaxError"),
        ("x = 1\nraise SystemExit(0)\n", "mine:f", r"SystemExit: 0 \(mine.py, line 2\)"),
    ],
)
def test_a_function_that_is_not_there_is_named(write, text, function, words):
    write("mine", text)
    with pytest.raises(ConfigError, match=words):
        load_function(function)


def test_the_row_that_makes_a_function_raise_is_named():
    def first_letter(rows):
        return [float(ord(row["response"][0])) for row in rows]

    with pytest.raises(RewardError, match=r"x, part-0: raised at sample 1-p1-0: IndexError: .*rewards.py, line"):
        call_function(first_letter, ROWS, WHERE)


def test_a_function_that_raises_for_all_rows_only_says_so():
    def at_most_two(rows):
        return [0.0 for _ in rows] if len(rows) < 3 else sys.exit(0)

    with pytest.raises(RewardError, match="raised for all 3 rows together, for none alone: SystemExit: 0"):
        call_function(at_most_two, ROWS, WHERE)


def test_a_function_that_changes_its_rows_changes_nothing_of_ours():
    def greedy(rows):
        for row in rows:
            row.clear()
        return [0.0 for _ in rows]

    call_function(greedy, ROWS, WHERE)
    assert ROWS[0] == {"sample_id": "1-p0-0", "response": "a"}


IDS = ["a", "b"]


@pytest.mark.parametrize(
    "found, words",
    [
        (None, "returned NoneType, expected a list of 2 numbers"),
        (1.0, "returned float"),
        ({"a": 1.0, "b": 2.0}, "returned dict"),
        ("ab", "returned str"),
        ([1.0], r"returned 1 scores for 2 rows \(a to b\)"),
        ([1.0, 2.0, 3.0], "returned 3 scores for 2 rows"),
        ([1.0, float("nan")], "score of sample b is nan"),
        ([float("-inf"), 1.0], "score of sample a is -inf"),
        ([1.0, None], "score of sample b is None"),
        ([1.0, "2"], "score of sample b is '2'"),
        ([True, 1.0], "score of sample a is True"),
        ([1.0, 1e39], r"score of sample b is 1e\+39"),
        ([1.0, 10**400], "score of sample b is 1000"),
        (np.array([[1.0, 2.0]]), r"returned an array of shape \(1, 2\), expected a list of 2 numbers"),
        (np.array([1.0, 2.0, 3.0]), "returned 3 scores for 2 rows"),
        (["1.0", "2.0"], "score of sample a is '1.0'"),
        (np.array([1.0, np.nan]), "score of sample b is nan"),
        ([np.float32(1.0), np.True_], "score of sample b is"),
    ],
)
def test_what_is_no_list_of_finite_numbers_is_named(found, words):
    with pytest.raises(AnswerError, match=f"^{words}"):
        checked_scores(found, IDS, nonfinite="error")


@pytest.mark.parametrize("found", [[1, 2.5], (1, 2.5), np.array([1, 2.5]), [np.int64(1), np.float32(2.5)]])
def test_numbers_of_any_kind_become_float32(found):
    scores = checked_scores(found, IDS, nonfinite="error")
    assert scores == [1.0, 2.5] and {type(score) for score in scores} == {float}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39, 10**400, np.float32("nan")])
def test_a_number_that_is_not_finite_is_one_to_drop_where_that_is_wanted(bad):
    assert checked_scores([1.0, bad], IDS, nonfinite="drop") == pytest.approx([1.0, np.nan], nan_ok=True)
    with pytest.raises(AnswerError, match=r"sample b is .*expected a finite number \(score\.nonfinite_scores: drop"):
        checked_scores([1.0, bad], IDS, nonfinite="error")


@pytest.mark.parametrize("found", [None, [1.0], [1.0, None], [1.0, "nan"], [1.0, True]])
def test_what_is_no_number_is_never_dropped(found):
    with pytest.raises(AnswerError):
        checked_scores(found, IDS, nonfinite="drop")


def test_the_example_counts_the_prompt_s_words_in_the_response():
    # Words of five letters or more: where, store, apples; the second response has store and apples.
    prompt = "Where do you store the apples?"
    rows = [{"prompt": prompt, "response": text} for text in ("No.", "In the STORE, as apples.")]
    assert mentions_the_question(rows) == pytest.approx([0.0, 2 / 3])
    assert mentions_the_question([{"prompt": "Hi", "response": "Hello"}]) == [0.0]
