"""Reward rules that compare a response with the row's ground truth. Pure functions; docs/rewards.md lists them."""

import json
import math
import re
import sys
import unicodedata
from typing import Any

from rlhf_core.errors import DataError

# Digits with or without commas between thousands, or a decimal without a leading digit; then an exponent. A sign counts
# only where no word, number, bracket or point ends right before it: 10-5 ends with 5.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212])?"
    r"(?:(?<![\d.])\.\d+|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?)"
    r"(?:[eE][-+]?\d+)?"
)
_OUTER = " \t\n.,;:!?\"'`“”‘’"
_RELATIVE, _ABSOLUTE = 1e-9, 1e-9
_LARGEST = sys.float_info.max


def exact_answer_score(response: str, ground_truth: Any) -> float:
    """Return 1.0 if the response is the ground truth, both normalised, else 0.0.

    Normalised: Unicode NFKC, case folded, runs of white space made one space, and spaces, quotes and . , ; : ! ?
    removed from both ends.

    Args:
        response: Text without special tokens.
        ground_truth: Text; a number or boolean, which counts as its JSON text; or a list of such, each of them right.

    Raises:
        DataError: If it is anything else (none at all, say).
    """
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not accepted or any(not isinstance(one, str | int | float) for one in accepted):
        raise DataError(f"ground_truth is {ground_truth!r}, expected text, a number, or a list of them")
    texts = [one if isinstance(one, str) else json.dumps(one) for one in accepted]
    return float(normalised(response) in map(normalised, texts))


def normalised(text: str) -> str:
    """Return a text without what exact_answer_score overlooks."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"\s+", " ", folded).strip(_OUTER)


def last_number_score(response: str, ground_truth: Any, *, partial_credit: float) -> float:
    """Return 1.0 if the last number of the response is the ground truth, less the further away it is.

        x = the response's last number, y = the ground truth's
        score = 1                                                  if abs(x - y) <= 1e-9 * max(1, abs(x), abs(y))
              = partial_credit * max(0, 1 - abs(x - y) / max(1, abs(y)))   otherwise
              = 0                                                  without a number

    Args:
        response: Text without special tokens.
        ground_truth: A number, or text whose last number is meant.
        partial_credit: What a wrong number gets at most, in [0, 1).

    Raises:
        DataError: If the ground truth holds no number.
    """
    if isinstance(ground_truth, str):
        right = last_number(ground_truth)
    elif not isinstance(ground_truth, bool) and isinstance(ground_truth, int | float) and abs(ground_truth) <= _LARGEST:
        right = float(ground_truth)
    else:
        right = None
    if right is None:
        raise DataError(f"ground_truth is {ground_truth!r}, expected a number or text with one")
    found = last_number(response)
    if found is None:
        return 0.0
    if math.isclose(found, right, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
        return 1.0
    return partial_credit * max(0.0, 1.0 - abs(found - right) / max(1.0, abs(right)))


def last_number(text: str) -> float | None:
    """Return the last number in a text, or None without one.

    Read are an optional sign (- + or the minus sign), digits (with commas between thousands, if so throughout), a
    decimal part after a point, and an exponent: "-1,234.5", ".5", "2e3". A sign counts only where no letter, digit,
    bracket or point stands right before it, and only right before its digits: "10-5" ends with 5, and so does "-$5".

    Returns:
        None also where the last number is too large for a float64.
    """
    found = _NUMBER.findall(text)
    if not found:
        return None
    value = float(found[-1].replace(",", "").replace("\u2212", "-"))
    return value if math.isfinite(value) else None
