"""How well a reward model's scores rank responses that people ranked: accuracy, its parts, and calibration."""

from collections.abc import Sequence

import numpy as np

from rlhf_core.algorithms.statistics import clustered_interval, pair_statistics
from rlhf_core.seeding import derive_seed
from rlhf_core.training.comparisons import Ranked, pair_places

_CALIBRATION_BINS = 10  # the usual number for the expected calibration error
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_SEED = 0  # of the bootstrap: the interval is a function of the pairs, not of the run's seed


def ranking(rows: Sequence[Ranked], scores: Sequence[np.ndarray]) -> dict[str, float]:
    """Return how scores rank all pairs of unequal rank, names as in docs/metrics.md; empty for no pairs.

    Args:
        rows: Ranked lists.
        scores: For each of them, [K] raw scores.
    """
    places = [(row, better, worse) for row, one in enumerate(rows) for better, worse in pair_places(one)]
    if not places:
        return {}
    chosen = np.array([scores[row][better] for row, better, _ in places], np.float64)
    rejected = np.array([scores[row][worse] for row, _, worse in places], np.float64)
    wins = (chosen > rejected).astype(np.float64)
    prompts = [rows[row].prompt for row, _, _ in places]
    seed = derive_seed(_SEED, "train_rm", "bootstrap")
    low, high = clustered_interval(wins, prompts, seed=seed, resamples=_RESAMPLES, confidence=_CONFIDENCE)
    longer = np.array([len(rows[row].response_ids[a]) - len(rows[row].response_ids[b]) for row, a, b in places])
    return {
        **{f"eval/{name}": value for name, value in pair_statistics(chosen, rejected).items()},
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/loss": pairwise_mean(chosen - rejected),
        "eval/calibration_error": calibration_error(chosen - rejected),
        "eval/length_baseline_accuracy": length_baseline(longer),
        **by_length(wins, longer),
        **by_source(wins, [rows[row].source for row, _, _ in places]),
        **with_annotators(chosen - rejected, [rows[row].agreement for row, _, _ in places]),
        "eval/pairs": len(places),
        "eval/prompts": len(set(prompts)),
    }


def pairwise_mean(margins: np.ndarray) -> float:
    """Return the mean of -log sigmoid(margin), nats, without overflow at any margin.

    Args:
        margins: [B], at least one, score(chosen) - score(rejected).
    """
    return float(np.mean(np.logaddexp(0.0, -margins)))


def held_out_loss(rows: Sequence[Ranked], scores: Sequence[np.ndarray]) -> float:
    """Return eval/loss: the plain Bradley-Terry loss of all pairs of unequal rank, whatever the model is trained by."""
    margins = [one[a] - one[b] for row, one in zip(rows, scores, strict=True) for a, b in pair_places(row)]
    return pairwise_mean(np.array(margins, np.float64))


def by_length(wins: np.ndarray, longer: np.ndarray) -> dict[str, float]:
    """Return the accuracy where the preferred response is longer, shorter or of equal length, and how many those are.

    Args:
        wins: [B], 1 where the preferred response scores higher.
        longer: [B], tokens of the preferred response minus tokens of the other.
    """
    found: dict[str, float] = {}
    for name, inside in (("longer", longer > 0), ("shorter", longer < 0), ("equal_length", longer == 0)):
        found[f"eval/pairs_chosen_{name}"] = int(inside.sum())
        if inside.any():
            found[f"eval/accuracy_chosen_{name}"] = float(wins[inside].mean())
    return found


def by_source(wins: np.ndarray, sources: Sequence[str]) -> dict[str, float]:
    """Return the accuracy on the pairs of each source, where there is more than one.

    Args:
        wins: [B], 1 where the preferred response scores higher.
        sources: [B], file or data set.
    """
    names = sorted(set(sources))
    if len(names) < 2:
        return {}
    return {f"eval/accuracy/{name}": float(wins[[source == name for source in sources]].mean()) for name in names}


def with_annotators(margins: np.ndarray, agreement: Sequence[float | None]) -> dict[str, float]:
    """Return how often an annotator agrees with the model, and with the majority, where the data tells.

        model = mean of a where margin > 0, 1 - a where margin < 0, 0.5 where margin = 0;  majority = mean of a

    The majority's is the most that any model can reach.

    Args:
        margins: [B], score(chosen) - score(rejected).
        agreement: [B], a, share of annotators who prefer the chosen response; None = unknown, and not counted.
    """
    known = np.array([share is not None for share in agreement])
    if not known.any():
        return {}
    share = np.array([share for share in agreement if share is not None])
    direction = np.sign(margins[known])
    return {
        "eval/annotator_agreement": float(np.mean(0.5 + direction * (share - 0.5))),
        "eval/annotator_majority": float(np.mean(share)),
    }


def calibration_error(margins: np.ndarray) -> float:
    """Return the expected calibration error of the preferences that margins imply.

        confidence_i = sigmoid(|margin_i|) in [0.5, 1];  right_i = margin_i > 0
        ECE = sum over 10 equal bins of (n_bin / n) * |mean right - mean confidence|

    Args:
        margins: [B], score(chosen) - score(rejected).

    Source: Guo et al. 2017, "On calibration of modern neural networks", eq. 3.
    """
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = (margins > 0).astype(float)
    bins = np.minimum((2 * (confidence - 0.5) * _CALIBRATION_BINS).astype(int), _CALIBRATION_BINS - 1)
    error = 0.0
    for index in range(_CALIBRATION_BINS):
        inside = bins == index
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return float(error)


def length_baseline(longer: np.ndarray) -> float:
    """Return the accuracy of ranking by length alone, in whichever direction does better on these very pairs.

    A tie in length counts as half. Choosing the direction on the pairs themselves favours the baseline.

    Args:
        longer: [B], tokens of the preferred response minus tokens of the other.
    """
    share = float(np.mean((longer > 0) + 0.5 * (longer == 0)))
    return max(share, 1 - share)
