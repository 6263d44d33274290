"""Ranked lists, the pairs in them, and the measures of how scores rank them, by hand.

Mutations that must fail here: ties counted as wins; identical pairs kept; a tie trained on with drop; margins of longer
lists kept; prompts resampled as pairs; lengths compared the wrong way round.
"""

import math

import numpy as np
import pytest

from rlhf_core.training.comparisons import Ranked, all_pairs, count, whole_lists
from rlhf_core.training.ranking import calibration_error, held_out_loss, length_baseline, ranking


def row(*responses: list[int], ranks: list[int], prompt: str = "p", source: str = "s", **data: float) -> Ranked:
    return Ranked(
        "q",
        prompt,
        source,
        [[1]] * len(responses),
        list(responses),
        ranks,
        data.get("margin", 0.0),
        data.get("agreement"),
    )


def names(rows: list[Ranked]) -> list[list[int]]:
    """The only token of each response of each list."""
    return [[ids[0] for ids in one.response_ids] for one in rows]


def test_ranked_lists_become_all_pairs_and_ties_are_counted() -> None:
    found = all_pairs([row([10], [11], [12], ranks=[1, 0, 1])], ties="drop")
    assert (names(found.rows), found.ties, found.identical) == ([[11, 10], [11, 12]], 1, 0)


def test_ties_are_kept_as_pairs_of_equal_rank_where_they_count_half() -> None:
    found = all_pairs([row([10], [11], [12], ranks=[1, 0, 1]), row([5], [5], ranks=[0, 0])], ties="half")
    assert names(found.rows) == [[11, 10], [11, 12], [10, 12]] and found.ties == 2
    assert [one.ranks for one in found.rows] == [[0, 1], [0, 1], [1, 1]]


def test_pairs_that_truncation_made_identical_are_dropped_and_counted() -> None:
    cut = Ranked("q", "p", "s", [[1, 264, 225], [1, 264, 225]], [[69] * 5, [69] * 5], [0, 1], 0.0, None)
    other = Ranked("r", "p", "s", [[1], [2]], [[69], [69]], [0, 1], 0.0, None)  # prompts cut differently: not identical
    found = all_pairs([cut, other], ties="drop")
    assert [one.pair_id for one in found.rows] == ["r"] and found.identical == 1
    assert ranking([cut], [np.zeros(2)]) == {}


def test_a_margin_belongs_to_a_list_of_two() -> None:
    pairs = all_pairs(
        [row([5], [6], ranks=[1, 0], margin=3.0), row([5], [6], [7], ranks=[0, 1, 2], margin=3.0)], ties="drop"
    )
    assert [one.margin for one in pairs.rows] == [3.0, 0.0, 0.0, 0.0]


def test_whole_lists_are_ordered_and_lose_copies_and_lists_that_say_nothing() -> None:
    rows = [
        row([10], [11], [12], ranks=[2, 0, 1]),
        row([10], [11], [10], ranks=[0, 1, 2]),  # the worse copy goes
        row([10], [11], ranks=[1, 1]),  # tied
        row([10], [10], ranks=[0, 1]),  # the same to the model
    ]
    found = whole_lists(rows)
    assert names(found.rows) == [[11, 12, 10], [10, 11]]
    assert (found.ties, found.identical) == (1, 2) == count(rows)


def test_accuracy_is_strict_and_counts_ties() -> None:
    # Margins 1, 0, -0.6, 0: one win of four, two ties. Losses 0.313262, ln 2, 1.037488, ln 2.
    rows = [row([5], [6], ranks=[0, 1], prompt=f"p{index}") for index in range(4)]
    scores = [np.array(pair) for pair in ([1.2, 0.2], [0.5, 0.5], [0.3, 0.9], [2.0, 2.0])]
    found = ranking(rows, scores)
    assert found["eval/accuracy"] == 0.25 and found["eval/accuracy_ties_half"] == 0.5 and found["eval/ties"] == 2
    assert found["eval/loss"] == pytest.approx(0.684261, abs=5e-7)
    assert found["eval/loss"] == held_out_loss(rows, scores)
    assert found["eval/pairs"] == found["eval/prompts"] == 4 == found["eval/pairs_chosen_equal_length"]
    assert found["eval/accuracy_chosen_equal_length"] == 0.25
    assert not any(name.startswith("eval/accuracy/") for name in found)  # one source


def test_the_loss_is_finite_at_any_margin() -> None:
    rows = [row([5], [6], ranks=[0, 1])]
    for margin in (100.0, 800.0):
        assert held_out_loss(rows, [np.array([-margin, 0.0])]) == margin
        assert ranking(rows, [np.array([-margin, 0.0])])["eval/calibration_error"] == pytest.approx(1.0)


def test_accuracy_by_length_and_by_source() -> None:
    rows = [
        row([5, 5], [6], ranks=[0, 1], source="a"),  # chosen longer, right
        row([6], [5, 5], ranks=[1, 0], source="a"),  # chosen longer, wrong
        row([5], [6, 6], ranks=[0, 1], source="b"),  # chosen shorter, wrong
        row([5], [6], ranks=[0, 1], source="b"),  # equal, right
    ]
    found = ranking(rows, [np.array(pair) for pair in ([1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0])])
    assert [found[f"eval/pairs_chosen_{name}"] for name in ("longer", "shorter", "equal_length")] == [2, 1, 1]
    assert [found[f"eval/accuracy_chosen_{name}"] for name in ("longer", "shorter", "equal_length")] == [0.5, 0.0, 1.0]
    assert found["eval/accuracy/a"] == 0.5 and found["eval/accuracy/b"] == 0.5


def test_agreement_with_annotators() -> None:
    # Model right, wrong and tied at agreements 0.8, 0.6 and 1.0: 0.8, 0.4, 0.5; one pair has no agreement.
    shares = [0.8, 0.6, 1.0]
    rows = [row([5], [6], ranks=[0, 1], agreement=share) for share in shares] + [row([5], [6], ranks=[0, 1])]
    found = ranking(rows, [np.array(pair) for pair in ([1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0])])
    assert found["eval/annotator_agreement"] == pytest.approx((0.8 + 0.4 + 0.5) / 3)
    assert found["eval/annotator_majority"] == pytest.approx(0.8)
    assert "eval/annotator_majority" not in ranking(rows[3:], [np.zeros(2)])


def test_the_interval_is_over_prompts_not_pairs() -> None:
    # Two prompts with 50 pairs each, all right and all wrong: a resample is 0, 0.5 or 1, so the interval is [0, 1].
    # As 100 independent pairs it would be 0.5 +- 0.1.
    rows = [row([5], [6], ranks=[0, 1], prompt=f"p{index // 50}") for index in range(100)]
    found = ranking(rows, [np.array([1.0, 0.0]) if index < 50 else np.array([0.0, 1.0]) for index in range(100)])
    assert (found["eval/accuracy_low"], found["eval/accuracy"], found["eval/accuracy_high"]) == (0.0, 0.5, 1.0)
    independent = [row([5], [6], ranks=[0, 1], prompt=f"p{index}") for index in range(100)]
    found = ranking(independent, [np.array([1.0, 0.0]) if index < 50 else np.array([0.0, 1.0]) for index in range(100)])
    # 1.96 * sqrt(0.25 / 100) = 0.098
    assert found["eval/accuracy_low"] == pytest.approx(0.402, abs=0.02)
    assert found["eval/accuracy_high"] == pytest.approx(0.598, abs=0.02)


def test_calibration_error_by_hand() -> None:
    # Two pairs at confidence sigmoid(ln 3) = 0.75, one right: |0.5 - 0.75| = 0.25.
    assert calibration_error(np.array([math.log(3), -math.log(3)])) == pytest.approx(0.25)
    # One pair at 0.75, right (error 0.25), and one at sigmoid(0) = 0.5, a tie, not right (error 0.5): mean of both.
    assert calibration_error(np.array([math.log(3), 0.0])) == pytest.approx(0.375)


def test_length_baseline_takes_the_better_direction_and_halves_ties() -> None:
    assert length_baseline(np.array([-1, 0, -1])) == pytest.approx((1 + 0.5 + 1) / 3)  # shorter wins, tie, shorter wins
