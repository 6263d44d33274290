"""The rule about the language of a response.

Mutations that must fail here: the probability instead of 1 or 0; the first of equally probable languages taken for one
that was told; any of the most probable languages good enough.
"""

import re
from pathlib import Path

import pytest
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from rlhf_core.reward.language import language_score
from rlhf_core.reward_config import LANGUAGES

REPLIES = [
    ("en", "I am happy to help you with that!"),
    ("en", "Water boils at one hundred degrees."),
    ("en", "My favourite colour is blue."),
    ("en", "To bake bread, mix flour, water, yeast and salt, then let it rise until it has doubled."),
    ("de", "Ich helfe dir gerne dabei!"),
    ("de", "Wasser kocht bei hundert Grad."),
    ("fr", "L'eau bout à cent degrés."),
    ("es", "El agua hierve a cien grados."),
    ("it", "L'acqua bolle a cento gradi."),
    ("nl", "Water kookt bij honderd graden."),
    ("zh", "当然，我很乐意帮助你。"),
    ("ja", "もちろん、喜んで。"),
    ("ar", "بالطبع، يسعدني ذلك"),
]


@pytest.mark.parametrize(("language", "reply"), REPLIES)
def test_a_short_reply_gets_one_in_its_own_language_and_nothing_in_another(language: str, reply: str) -> None:
    assert language_score(reply, language=language) == 1.0
    assert [language_score(reply, language=other) for other in {"en", "de", "fr"} - {language}] == [0.0] * (
        3 - (language in ("en", "de", "fr"))
    )


@pytest.mark.parametrize("reply", ["", " ", "42", "1 + 1 = 2", "!!!", "😀", "a", "x y"])
def test_a_reply_that_tells_nothing_is_in_no_language(reply: str) -> None:
    # The library still names one of the equally probable languages first; which one is not the same everywhere.
    assert not any(language_score(reply, language=language) for language in LANGUAGES)


def test_the_codes_are_those_of_the_library_and_the_page_lists_them() -> None:
    labels = LanguageIdentifier.from_model_file(MODEL_FILE).labels
    assert sorted(labels) == [*LANGUAGES, "zxx"]
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
    listed = re.search(r"`language` is one of\n\n((?:    .*\n)+)", page)
    assert listed is not None and listed[1].split() == LANGUAGES
