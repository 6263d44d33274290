"""Rules and answers, each against its definition.

Mutations that must fail here: search for fullmatch; a rule's score with the sign flipped; length counted from the wrong
end; NaN read as JSON; total and distinct swapped; first number for last; commas ignored or read as decimals; partial
credit for a right answer; a missing ground truth scored 0.
"""

import math

import pytest

from rlhf_core.errors import DataError
from rlhf_core.reward.answers import exact_answer_score, last_number, last_number_score, normalised
from rlhf_core.reward.rules import json_format_score, length_score, regex_score, repetition_score


@pytest.mark.parametrize(
    "response, pattern, match, expected",
    [
        ("a1", "[a-z]", "search", 1.0),
        ("a1", "[a-z]", "fullmatch", 0.0),
        ("a1", "[a-z][0-9]", "fullmatch", 1.0),
        ("YES", "yes", "search", 0.0),
        ("YES", "(?i)yes", "fullmatch", 1.0),
        ("yes\n", "yes", "fullmatch", 0.0),
        ("a\nb", "a.b", "search", 0.0),
        ("a\nb", "(?s)a.b", "search", 1.0),
        ("", ".*", "fullmatch", 1.0),
    ],
)
def test_a_pattern_matches_or_not(response, pattern, match, expected):
    assert regex_score(response, pattern=pattern, match=match) == expected


@pytest.mark.parametrize(
    "tokens, expected",
    # Range 10 to 20, falloff 8: 1 inside; 4 outside is 1 - 4/8 = 0.5; 8 and more outside is 0.
    [(10, 1.0), (15, 1.0), (20, 1.0), (6, 0.5), (24, 0.5), (9, 0.875), (21, 0.875), (2, 0.0), (28, 0.0), (0, 0.0)],
)
def test_length_falls_in_a_straight_line_outside_its_range(tokens, expected):
    assert length_score(tokens, min_tokens=10, max_tokens=20, falloff_tokens=8) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "response, keys, expected",
    [
        ('{"a": 1}', [], 1.0),
        ('{"a": 1}', ["a"], 1.0),
        ('{"a": 1}', ["a", "b"], 0.0),
        ('{"a": 1, "b": null}', ["a", "b"], 1.0),
        (" [1, 2]\n", [], 1.0),
        ('["a"]', ["a"], 0.0),
        ('"a"', ["a"], 0.0),
        ("7", [], 1.0),
        ("NaN", [], 0.0),
        ('{"a": -Infinity}', ["a"], 0.0),
        ('```json\n{"a": 1}\n```', [], 0.0),
        ('{"a": 1} done', [], 0.0),
        ("{'a': 1}", [], 0.0),
        ("", [], 0.0),
        ("9" * 5000, [], 0.0),
        ("[" * 100_000, [], 0.0),
    ],
)
def test_json_is_the_whole_response_or_nothing(response, keys, expected):
    assert json_format_score(response, required_keys=keys) == expected


@pytest.mark.parametrize(
    "ids, n, expected",
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 1, 1, 1], 2, 1 / 3 - 1),  # 3 bigrams, 1 distinct
        ([1, 2, 1, 2, 1], 2, 2 / 4 - 1),  # 12 21 12 21
        ([5, 6, 5], 1, 2 / 3 - 1),
        ([1, 2], 3, 0.0),
        ([1, 2, 3], 3, 0.0),
        ([], 1, 0.0),
    ],
)
def test_repetition_is_the_share_of_ngrams_seen_before(ids, n, expected):
    assert repetition_score(ids, ngram=n) == pytest.approx(expected, abs=1e-12)


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response, truth, expected",
    [
        ("Paris", "Paris", 1.0),
        (" paris.\n", "Paris", 1.0),
        ('"Paris!"', "paris", 1.0),
        ("New\n  York", "new york", 1.0),
        ("ｐａｒｉｓ", "Paris", 1.0),  # full-width letters
        ("STRASSE", "straße", 1.0),
        ("It is Paris", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("42", 42, 1.0),
        ("42.0", 42, 0.0),
        ("true", True, 1.0),
        ("no", ["nope", "No"], 1.0),
        ("maybe", ["nope", "No"], 0.0),
    ],
)
def test_the_answer_is_compared_without_case_spaces_and_outer_punctuation(response, truth, expected):
    assert exact_answer_score(response, truth) == expected


def test_inner_punctuation_is_kept():
    assert normalised("U.S., really") == "u.s., really"


@pytest.mark.parametrize("truth", [None, {}, [], [None], {"a": 1}])
def test_an_answer_without_a_usable_ground_truth_is_an_error_not_a_zero(truth):
    with pytest.raises(DataError, match="ground_truth is"):
        exact_answer_score("x", truth)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The answer is 42.", 42.0),
        ("3 plus 4 is 7", 7.0),
        ("1,234", 1234.0),
        ("$1,234,567.89 in all", 1234567.89),
        ("1,23", 23.0),  # no thousands: two numbers
        ("1,2345", 2345.0),
        ("1234,567", 567.0),
        ("-5", -5.0),
        ("= -5", -5.0),
        ("\u22125", -5.0),
        ("+5", 5.0),
        ("10-5", 5.0),
        ("(3)-4", 4.0),
        ("x-4", 4.0),
        ("- 5", 5.0),
        ("-$5", 5.0),
        ("$-5", -5.0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("-.5", -0.5),
        ("3.14.", 3.14),
        ("2e3", 2000.0),
        ("1.5E-2 m", 0.015),
        ("7 eggs", 7.0),
        ("50%", 50.0),
        ("#### 72", 72.0),
        ("007", 7.0),
        ("1.2.3", 3.0),
        ("1e999", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, expected):
    found = last_number(text)
    assert (found is None) if expected is None else found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "response, truth, credit, expected",
    [
        ("It is 12.", 12, 0.5, 1.0),
        ("It is 12.0", 12, 0.5, 1.0),
        ("12 or 13", 12, 0.0, 0.0),
        ("13", 12, 0.5, 0.5 * (1 - 1 / 12)),
        ("9", 12, 0.5, 0.5 * (1 - 3 / 12)),
        ("24", 12, 0.5, 0.0),
        ("100", 12, 0.5, 0.0),
        ("0.5", 0, 0.5, 0.25),  # the distance is relative to at least 1: 0.5 * (1 - 0.5 / 1)
        ("-12", 12, 0.5, 0.0),
        ("no idea", 12, 0.5, 0.0),
        ("1e999", 12, 0.5, 0.0),
        ("1,000", "#### 1,000", 0.0, 1.0),
        ("0.30000000000000004", 0.3, 0.0, 1.0),
    ],
)
def test_the_last_number_is_right_or_partly_right(response, truth, credit, expected):
    assert last_number_score(response, truth, partial_credit=credit) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("truth", [None, "none", True, [], {}, math.inf, 10**400])
def test_a_ground_truth_without_a_number_is_an_error_not_a_zero(truth):
    with pytest.raises(DataError, match="ground_truth is"):
        last_number_score("1", truth, partial_credit=0.0)
