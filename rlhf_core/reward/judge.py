"""The demo's judge: a fixed, documented rule that stands for the true reward. Pure Python, no model.

It is what the demo's preference pairs are labelled with and, as a source of evaluate.rewards, what held-out responses
are evaluated by, so that the reward model (the proxy) and the true reward can be told apart.
"""

import re
from functools import cache

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from rlhf_core.errors import DataError

UNFINISHED_PENALTY = 1.0

# A full stop, exclamation or question mark, then any closing quotes and brackets.
_FINISHED = re.compile(r"""[.!?]["'”’»)\]}]*\s*\Z""")


def judge(response: str, finish_reason: str) -> float:
    """Return how pleasant and complete a response is.

    score = sentiment(response) - 1 * (the response is not a finished sentence)

    sentiment is VADER's compound score in [-1, 1]. A response is unfinished when it was cut off (finish_reason
    "length"), or does not end in . ! or ?, closing quotes and brackets after it allowed. The empty response gets -1.

    Args:
        response: Text without special tokens.
        finish_reason: "stop" (the model ended the response) or "length" (cut off).

    Returns:
        A score in [-2, 1].

    Raises:
        DataError: If finish_reason is neither.

    Source: Hutto and Gilbert 2014, VADER; the penalty is our own.
    """
    if finish_reason not in ("stop", "length"):
        raise DataError(f"finish_reason is {finish_reason!r}: expected stop or length")
    sentiment = float(_analyzer().polarity_scores(response)["compound"])
    return sentiment - (0.0 if is_finished(response, finish_reason) else UNFINISHED_PENALTY)


def is_finished(response: str, finish_reason: str) -> bool:
    """Return whether the model ended the response, and at the end of a sentence."""
    return finish_reason == "stop" and _FINISHED.search(response) is not None


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()
