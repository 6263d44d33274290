"""What a reward model has to beat: the length of a response, and a linear model of its words."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.artifacts.shards import read_table
from rlhf_core.errors import ConfigError

_NGRAMS = (1, 2)
_MIN_ROWS = 2  # responses that a word must occur in
_INVERSE_PENALTY = 1.0
_ITERATIONS = 1000


@dataclass(frozen=True)
class Pairs:
    """All pairs of unequal rank on one side of the split that the model can tell apart."""

    names: list[str]  # [B], pair_id of the list that it is from
    places: list[tuple[int, int]]  # [B], better and worse in that list
    texts: list[tuple[str, str]]  # [B], better and worse
    tokens: list[tuple[int, int]]  # [B], their lengths
    clusters: list[str]  # [B], pairs that are no independent evidence: of one prompt, or of one tree


def read_pairs(preferences: Path, split: str) -> Pairs:
    """Read the pairs of one side, as train_rm measures them.

    Args:
        preferences: The artifact.
        split: train or eval.
    """
    found = Pairs([], [], [], [], [])
    columns = ["pair_id", "prompt", "responses", "response_ids", "ranks", "split"]
    for row in read_table(preferences, columns).to_pylist():
        if row["split"] != split:
            continue
        ids, ranks, texts = row["response_ids"], row["ranks"], row["responses"]
        tree, colon, _ = row["pair_id"].partition(":")
        for better in range(len(ranks)):
            for worse in range(len(ranks)):
                if ranks[better] < ranks[worse] and ids[better] != ids[worse]:
                    found.names.append(row["pair_id"])
                    found.places.append((better, worse))
                    found.texts.append((texts[better], texts[worse]))
                    found.tokens.append((len(ids[better]), len(ids[worse])))
                    found.clusters.append(tree if colon else row["prompt"])
    return found


def wins(margins: np.ndarray) -> np.ndarray:
    """Return [B] 1 where the margin better minus worse is above 0, 0.5 where it is 0, else 0."""
    return (np.sign(margins) + 1) / 2


def shorter(pairs: Pairs) -> np.ndarray:
    """Return [B] the margins of preferring the shorter response, in tokens."""
    return np.array([worse - better for better, worse in pairs.tokens], np.float64)


def words(train: Sequence[tuple[str, str]], held_out: Sequence[tuple[str, str]]) -> np.ndarray:
    """Return [B] the held-out margins of a Bradley-Terry model that is linear in TF-IDF.

        P(a better than b) = sigmoid(w . (tfidf(a) - tfidf(b)))

    Of words and pairs of words in the response, lower case, term frequency 1 + log; prompts are not read.

    Args:
        train: Texts, better and worse, to learn words, their weights and w from.
        held_out: Texts to measure.

    Raises:
        ConfigError: If scikit-learn is missing.

    Source: Bradley and Terry 1952; fitted as a logistic regression of differences without intercept.
    """
    text, linear = scikit_learn()
    vectoriser = text.TfidfVectorizer(ngram_range=_NGRAMS, min_df=_MIN_ROWS, sublinear_tf=True)
    vectoriser.fit([response for pair in train for response in pair])

    def differences(pairs: Sequence[tuple[str, str]]) -> Any:
        better, worse = zip(*pairs, strict=True)
        return vectoriser.transform(better) - vectoriser.transform(worse)

    from scipy.sparse import vstack

    known = differences(train)
    model = linear.LogisticRegression(C=_INVERSE_PENALTY, fit_intercept=False, max_iter=_ITERATIONS)
    # Both orders of each pair: a logistic regression wants two classes.
    model.fit(vstack([known, -known]), np.repeat([1, 0], len(train)))
    return np.asarray(model.decision_function(differences(held_out)), np.float64)


def scikit_learn() -> tuple[Any, Any]:
    """Return its modules feature_extraction.text and linear_model.

    Raises:
        ConfigError: If it is missing, with the command that installs it.
    """
    try:
        from sklearn import linear_model
        from sklearn.feature_extraction import text
    except ImportError:
        raise ConfigError(
            "the TF-IDF floor needs scikit-learn, which the project itself does not: pip install --no-deps --target"
            " .work/floor -r benchmarks/requirements.txt, then put PYTHONPATH=.work/floor before this command; or leave"
            " the floor out with --no-floor"
        ) from None
    return text, linear_model
