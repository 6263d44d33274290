"""The oracles themselves reproduce numbers that were worked out by hand, and share no code with what they judge."""

import ast
import math
from pathlib import Path

import pytest

from tests.reference import oracles

exact = {"rel": 1e-9, "abs": 1e-12}


def test_oracles_do_not_import_what_they_judge() -> None:
    tree = ast.parse(Path(oracles.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert sorted(names) == ["collections.abc", "decimal", "math", "statistics"]


def test_kl() -> None:
    assert oracles.kl(0.5, 0.0, "k1") == 0.5
    assert oracles.kl(0.5, 0.0, "k2") == 0.125
    assert oracles.kl(0.5, 0.0, "k3") == pytest.approx(math.exp(-0.5) - 0.5, **exact)
    # The series d^2/2 - d^3/6 + d^4/24 at d = -1e-4.
    assert oracles.kl(-1e-4, 0.0, "k3") == pytest.approx(5e-9 + 1e-12 / 6 + 1e-16 / 24, rel=1e-12)


def test_gae_by_two_roads() -> None:
    # gamma 1, lambda 0.5. deltas: 1 + 0.25 - 0.5 = 0.75; 2 - 0.25 = 1.75. A = [0.75 + 0.5 * 1.75, 1.75].
    assert oracles.gae([1, 2], [0.5, 0.25], 1.0, 0.5) == pytest.approx([1.625, 1.75], **exact)
    padded = oracles.gae_padded([1, 2, 9], [0.5, 0.25, 9], [True, True, False], 1.0, 0.5)
    assert padded == pytest.approx([1.625, 1.75, 0], **exact)
    assert oracles.discounted_returns([1, 2], 0.5) == pytest.approx([2, 2], **exact)


def test_losses_by_cases() -> None:
    for ratio, plus, minus in [
        (0.5, -1.0, 1.6),
        (0.9, -1.8, 1.8),
        (1.0, -2.0, 2.0),
        (1.1, -2.2, 2.2),
        (1.5, -2.4, 3.0),
    ]:
        assert oracles.policy_loss(math.log(ratio), 2.0, 0.2, 0.2) == pytest.approx(plus, **exact)
        assert oracles.policy_loss(math.log(ratio), -2.0, 0.2, 0.2) == pytest.approx(minus, **exact)
    assert oracles.policy_loss(math.log(5), -1.0, 0.2, 0.4, 3.0, weight=0.5) == pytest.approx(1.5, **exact)
    assert oracles.policy_loss(math.log(5), 1.0, 0.2, 0.4, 3.0) == pytest.approx(-1.4, **exact)
    assert oracles.policy_slope(math.log(2), -1.0, 0.2, 0.2, 3.0) == pytest.approx(2.0, **exact)
    assert oracles.policy_slope(math.log(5), -1.0, 0.2, 0.2, 3.0) == oracles.policy_slope(1.0, 1.0, 0.2, 0.2) == 0
    assert oracles.sequence_log_ratio([-0.9, -1.7], [-1.0, -2.0]) == pytest.approx(0.2, **exact)
    assert oracles.value_loss(1.0, 0.0, 2.0, 0.3) == pytest.approx(0.5 * 1.7**2, **exact)
    assert oracles.value_loss(-1.0, 0.0, 2.0, 0.3) == pytest.approx(0.5 * 3.0**2, **exact)
    assert oracles.value_loss(1.0, 0.0, 2.0, None, 0.25) == pytest.approx(0.25, **exact)


def test_kl_slopes_and_aggregates() -> None:
    assert oracles.kl(-0.5, 0.0, "absolute") == 0.5
    for estimator, slope in [("k1", 1.0), ("k2", -0.5), ("absolute", -1.0), ("k3", 1 - math.exp(0.5))]:
        assert oracles.kl_slope(-0.5, 0.0, estimator) == pytest.approx(slope, **exact)
    assert oracles.kl_slope(-21.0, 0.0, "k3") == 0
    rows = [[1.0], [3.0, 5.0, 4.0]]
    for aggregation, expected in [("token_mean", 3.25), ("sequence_mean", 2.5), ("constant", 0.8125)]:
        assert oracles.aggregated(rows, aggregation, 8.0) == pytest.approx(expected, **exact)


def test_whiten_and_explained_variance() -> None:
    assert oracles.whiten([1, 2, 6]) == pytest.approx([-0.925820, -0.462910, 1.388730], abs=1e-6)
    assert oracles.whiten([1, 2, 6], bessel=True) == pytest.approx([-0.755929, -0.377964, 1.133893], abs=1e-6)
    assert oracles.whiten([1e-5, -1e-5], floor=True) == pytest.approx([0.1, -0.1], **exact)
    assert oracles.explained_variance([0, 0], [1, 3]) == pytest.approx(0.0, **exact)
    assert oracles.explained_variance([1, 3], [1, 3]) == pytest.approx(1.0, **exact)


def test_group_advantages_and_other_estimators() -> None:
    # 1 against 2 and 6: 1 - 4; mean 3, deviation sqrt(14 / 2).
    assert oracles.group_advantage(1, [2, 6], "rloo", 0.0) == -3
    assert oracles.group_advantage(1, [2, 6], "dr_grpo", 0.0) == -2
    assert oracles.group_advantage(1, [2, 6], "grpo", 0.5) == pytest.approx(-2 / (7**0.5 + 0.5), **exact)
    assert oracles.group_advantage(1, [], "rloo", 0.0) == oracles.group_advantage(1, [1, 1], "grpo", 0.0) == 0
    assert oracles.advantages([1, 2], [0.5, 0.25], [], "reward_minus_value", 1.0, 1.0, 0.0) == [2.5, 2.75]
    assert oracles.advantages([1, 2], [0, 0], [], "reinforce_plus_plus", 0.5, 0.0, 0.0) == [2, 2]


def test_importance_weights_and_overlong_penalty() -> None:
    # Ratios 4 and 1: geometric mean 2.
    row = [math.log(4), 0.0], [0.0, 0.0]
    for correction, low, high, expected in [
        ("none", 0.5, 2.0, [1, 1]),
        ("truncate", 0.5, 2.0, [2, 1]),
        ("mask", 0.5, 2.0, [0, 1]),
        ("reject_sequence", 0.5, 2.5, [2.5, 1]),
        ("reject_sequence", 0.5, 1.5, [0, 0]),
    ]:
        assert oracles.importance_weights(row[1], row[0], correction, low, high) == pytest.approx(expected, **exact)
    assert [oracles.overlong_penalty(n, 10, 4, 2.0) for n in (6, 7, 10, 11)] == [0, 0.5, 2, 2]


def test_log_softmax_at_a_temperature() -> None:
    assert oracles.log_softmax([2, 1, 0], 1.0) == pytest.approx([-0.407606, -1.407606, -2.407606], abs=1e-6)
    assert oracles.log_softmax([2, 1, 0], 0.5) == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)
