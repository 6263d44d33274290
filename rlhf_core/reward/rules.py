"""Reward rules about the form of a response: pure functions of its text or its tokens. docs/rewards.md lists them."""

import json
import re
from collections.abc import Sequence


def regex_score(response: str, *, pattern: str, match: str) -> float:
    """Return 1.0 if a regular expression matches the response, else 0.0.

    Args:
        response: Text without special tokens, taken as it is: no space is removed.
        pattern: Of Python's re. Flags go into it: (?i) ignores case, (?s) lets a point match a line end.
        match: fullmatch (the whole response) or search (any part of it).
    """
    found = re.fullmatch(pattern, response) if match == "fullmatch" else re.search(pattern, response)
    return float(found is not None)


def length_score(tokens: int, *, min_tokens: int, max_tokens: int, falloff_tokens: int) -> float:
    """Return 1 for a length inside a range, falling in a straight line to 0 outside it.

        score = max(0, 1 - max(min_tokens - T, T - max_tokens, 0) / falloff_tokens)

    Args:
        tokens: T, tokens of the response, the EOS included.
        min_tokens: Shortest length that gets 1.
        max_tokens: Longest length that gets 1.
        falloff_tokens: So far outside, the score is 0.
    """
    return max(0.0, 1.0 - max(min_tokens - tokens, tokens - max_tokens, 0) / falloff_tokens)


def json_format_score(response: str, *, required_keys: Sequence[str]) -> float:
    """Return 1.0 if the response is JSON, and an object with all of some keys if there are any; else 0.0.

    White space around it is allowed; anything else around it, a code fence too, is not. NaN and Infinity, which Python
    would read, are no JSON.

    Args:
        response: Text without special tokens.
        required_keys: Keys that the outermost object must have; with none, any JSON value will do.
    """
    try:
        content = json.loads(response, parse_constant=_refuse)
    except (ValueError, RecursionError):  # ValueError: also an integer of more digits than Python reads
        return 0.0
    if not required_keys:
        return 1.0
    return float(isinstance(content, dict) and all(key in content for key in required_keys))


def repetition_score(response_ids: Sequence[int], *, ngram: int) -> float:
    """Return minus the share of n-grams of tokens that occurred before in the response.

        score = distinct / total - 1, over the T - n + 1 n-grams

    Args:
        response_ids: [T].
        ngram: n, at least 1.

    Returns:
        Above -1, at most 0; 0 for a response of fewer than n tokens.
    """
    total = len(response_ids) - ngram + 1
    if total < 1:
        return 0.0
    distinct = {tuple(response_ids[start : start + ngram]) for start in range(total)}
    return len(distinct) / total - 1.0


def _refuse(constant: str) -> None:
    raise ValueError(constant)
