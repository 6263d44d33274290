"""The demo's judge.

Mutations that must fail here: drop the penalty; count it twice; ask for the full stop only; look at finish_reason only.
"""

import subprocess
import sys

import pytest

from rlhf_core.errors import DataError
from rlhf_core.reward.judge import judge

# VADER: compound = x / sqrt(x^2 + 15), rounded to 4 digits, x the sum of word valences. good 1.9, bad -2.5; each
# exclamation mark adds 0.292.
#   good: 1.9 / sqrt(3.61 + 15) = 0.4404     bad: -2.5 / sqrt(6.25 + 15) = -0.5423
#   good!: 2.192 / sqrt(4.804864 + 15) = 0.4926
GOOD, BAD, GREAT = 0.4404, -0.5423, 0.4926


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("It is good.", GOOD),
        ("It is bad.", BAD),
        ("It is good!", GREAT),
        ("The table is a table.", 0.0),
        ("Is it good?", GOOD),
        ('"It is good."', GOOD),
        ("(It is good.)", GOOD),
        ("It is good. “Table.”", GOOD),
        ("It is good. \n", GOOD),
    ],
)
def test_finished_sentence_gets_its_sentiment(response, score):
    assert judge(response, "stop") == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("response", ["It is good.", "It is bad.", "The table is a table.", '"It is good."'])
def test_cut_off_response_loses_exactly_one(response):
    assert judge(response, "length") == judge(response, "stop") - 1


@pytest.mark.parametrize("response", ["It is good", "It is good,", "It is good. And", "It is good:", "It is good)"])
def test_sentence_without_an_end_loses_exactly_one(response):
    assert judge(response, "stop") == pytest.approx(GOOD - 1, abs=1e-12)


def test_unfinished_twice_is_punished_once():
    assert judge("It is good", "length") == pytest.approx(GOOD - 1, abs=1e-12)


def test_empty_response():
    assert judge("", "stop") == judge("", "length") == judge(" \n", "stop") == -1.0


def test_unknown_finish_reason():
    with pytest.raises(DataError, match="finish_reason is 'abort': expected stop or length"):
        judge("It is good.", "abort")


def test_needs_neither_numpy_nor_torch():
    code = "import sys, rlhf_core.reward.judge; sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
