"""A reward rule about the language that a response is written in, as py3langid tells it."""

from functools import cache

from py3langid.langid import MODEL_FILE, LanguageIdentifier


def language_score(response: str, *, language: str) -> float:
    """Return 1.0 if a language is the most probable one of the response, else 0.0.

    It is 1 or 0, not the probability, because the probability grows with the length of a text: the reward would be one
    for length. A text that tells nothing (empty, without letters, or too short to hold any of the library's features)
    has no language and gets 0.

    Args:
        response: Text without special tokens.
        language: One of LANGUAGES of rlhf_core/reward_config.py.

    Source: Lui and Baldwin 2012, langid.py: naive Bayes over byte n-grams, 140 labels; retrained by py3langid.
    """
    if not any(character.isalpha() for character in response):
        return 0.0
    ranked = _identifier().rank(response)
    (best, highest), (_, lowest) = ranked[0], ranked[-1]
    return float(best == language and highest > lowest)  # all equal: no feature was found


@cache
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE)
