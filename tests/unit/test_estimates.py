"""From scores to advantages in one go: golden rows for each convention, the order of the steps, empty responses.

Mutations that must fail here: returns after whitening; rewards whitened after GAE or with the mean removed; metrics of
whitened advantages; empty responses counted in means; the score slot left out, whitened with the advantages, or given
to a response that fills max_new_tokens; n in place of n - 1.
"""

from typing import Any

import numpy as np
import pytest

from rlhf_core.algorithms.responses import Responses
from rlhf_core.errors import SchemaMismatch
from tests.iteration import Result, estimated, responses, rewarded

# kl_coef 0.05, gamma 1, lambda 0.95. d = [-0.2, 0.1, 0.5 | 0.2].
# rewards = [0.01, -0.005, -0.025 + 1.5 | -0.01 - 0.5].
# Row 0 backwards: 1.475 - 0.2 = 1.275; -0.005 + 0.2 - 0.5 + 0.95*1.275 = 0.90625; 0.01 + 0.5 - 0.3 + 0.95*0.90625
# = 1.0709375. Row 1: -0.51 - 0.1 = -0.61. Mean 0.66054688, variance 0.55515812 (0.74021083 with n - 1).
LOGPROBS, REF = [[-1.2, -0.4, -2.0], [-0.7]], [[-1.0, -0.5, -2.5], [-0.9]]
VALUES, SCORES = [[0.3, 0.5, 0.2], [0.1]], [1.5, -0.5]
REWARDS = [0.01, -0.005, 1.475, -0.51]
ADVANTAGES = [1.0709375, 0.90625, 1.275, -0.61]
RETURNS = [1.3709375, 1.40625, 1.475, -0.51]
WHITE = [0.550794, 0.329763, 0.824670, -1.705228]
WHITE_BESSEL = [0.477001, 0.285583, 0.714186, -1.476770]


def batch(rows: list[int] | None = None) -> Responses:
    """The golden rows; -1 in `rows` stands for a response without tokens and a score of 7."""
    rows = [0, 1] if rows is None else rows

    def of(column: list[Any], empty: Any) -> list[Any]:
        return [column[i] if i >= 0 else empty for i in rows]

    return responses(of(LOGPROBS, []), of(REF, []), of(VALUES, []), of(SCORES, 7.0))


def run(rows: list[int] | None = None, **changes: Any) -> Result:
    return estimated(batch(rows), **changes)


def test_golden_rows() -> None:
    found = run().estimates
    np.testing.assert_allclose(found.rewards, REWARDS, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.advantages, ADVANTAGES, rtol=1e-9, atol=0)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns, RETURNS, rtol=1e-9, atol=0)


def test_metrics_of_the_golden_rows() -> None:
    # Summed d: 0.4 and 0.2, so the KL reward is -0.05 * 0.3; scores 1.5 and -0.5 have mean 0.5.
    metrics = run().metrics
    residual = np.array(ADVANTAGES)
    assert metrics == pytest.approx(
        {
            "objective/kl_coef": 0.05,
            "objective/non_score_reward": -0.015,
            "objective/scores_final": 0.5,
            "objective/rlhf_reward": 0.485,
            "advantages/mean": 0.66054688,
            "advantages/std": 0.55515812**0.5,
            "advantages/tokens": 4,
            "advantages/empty_responses": 0,
            "returns/mean": 3.7421875 / 4,
            "returns/std": float(np.std(RETURNS)),
            "values/mean": 0.275,
            "val/explained_variance": float(1 - np.var(residual) / np.var(RETURNS)),
            "correction/weight_mean": 1.0,
            "correction/zeroed_fraction": 0.0,
            "correction/truncated_fraction": 0.0,
            "correction/rejected_responses": 0,
            "correction/ess": 1.0,
        },
        rel=1e-7,
    )


@pytest.mark.parametrize(
    ("conventions", "variance", "expected"),
    [
        ("ours", None, WHITE),
        ("ours", "bessel", WHITE_BESSEL),
        ("verl", None, WHITE_BESSEL),
        ("verl", "population", WHITE),
        ("openrlhf", None, WHITE),
    ],
)
def test_whitening_changes_advantages_and_nothing_else(conventions: str, variance: Any, expected: list[float]) -> None:
    plain = run(conventions=conventions)
    white = run(conventions=conventions, whiten_advantages=True, whitening_variance=variance)
    np.testing.assert_allclose(white.estimates.advantages, expected, atol=1e-6)
    np.testing.assert_array_equal(white.estimates.returns, plain.estimates.returns)
    assert white.metrics == plain.metrics


# --- one response under each convention ---------------------------------------------------------------------------

# d = [0.2, -0.2, 0.2], kl_coef 0.05: KL rewards [-0.01, 0.01, -0.01]; score 1; V [0.1, 0.2, 0.3], one slot later 0.4.
# On the last token: r = [-0.01, 0.01, 0.99]. Backwards: 0.99 - 0.3 = 0.69; 0.01 + 0.3 - 0.2 + 0.95*0.69 = 0.7655;
# -0.01 + 0.2 - 0.1 + 0.95*0.7655 = 0.817225.
# In the slot: r = [-0.01, 0.01, -0.01 | 1]. Backwards: 1 - 0.4 = 0.6; -0.01 + 0.4 - 0.3 + 0.95*0.6 = 0.66;
# 0.01 + 0.3 - 0.2 + 0.95*0.66 = 0.737; -0.01 + 0.2 - 0.1 + 0.95*0.737 = 0.79015.
GOLDEN: dict[str, Any] = {
    "logprobs": [[-1, -2, -0.5]],
    "ref_logprobs": [[-1.2, -1.8, -0.7]],
    "values": [[0.1, 0.2, 0.3]],
    "scores": [1.0],
    "bootstrap": [0.4],
}
AT_LAST, AT_LAST_RETURNS = [0.817225, 0.7655, 0.69], [0.917225, 0.9655, 0.99]
IN_SLOT, IN_SLOT_RETURNS = [0.79015, 0.737, 0.66], [0.89015, 0.937, 0.96]
UNBIASED, BIASED = [0.9323, 0.1239, -1.0562], [1.1418, 0.1517, -1.2935]


@pytest.mark.parametrize(
    ("conventions", "advantages", "returns", "at_end", "white"),
    [
        ("trl", IN_SLOT, IN_SLOT_RETURNS, 1.0, [0.9337, 0.1215, -1.0552]),
        ("verl", AT_LAST, AT_LAST_RETURNS, np.nan, UNBIASED),
        ("openrlhf", AT_LAST, AT_LAST_RETURNS, np.nan, BIASED),
        ("ours", AT_LAST, AT_LAST_RETURNS, np.nan, BIASED),
    ],
)
def test_one_response_under_each_convention(
    conventions: str, advantages: list[float], returns: list[float], at_end: float, white: list[float]
) -> None:
    plain = estimated(responses(**GOLDEN), conventions=conventions).estimates
    np.testing.assert_allclose(plain.advantages, advantages, rtol=1e-9, atol=0)
    assert plain.returns is not None and plain.bootstrap_returns is not None
    np.testing.assert_allclose(plain.returns, returns, rtol=1e-9, atol=0)
    np.testing.assert_allclose(plain.bootstrap_returns, [at_end], rtol=1e-9)
    found = estimated(responses(**GOLDEN), conventions=conventions, whiten_advantages=True).estimates
    np.testing.assert_allclose(found.advantages, white, atol=5e-5)
    assert found.returns is not None
    np.testing.assert_array_equal(found.returns, plain.returns)


@pytest.mark.parametrize("conventions", ["ours", "trl", "verl", "openrlhf"])
def test_k3_of_the_golden_tokens_is_the_same_under_all_conventions(conventions: str) -> None:
    # exp(-0.2) - 1 + 0.2 = 0.018731; exp(0.2) - 1 - 0.2 = 0.021403. The score is 1, on the last token or in the slot.
    found = estimated(responses(**GOLDEN), conventions=conventions, kl_estimator="k3", kl_coef=1.0).estimates
    expected = [-0.018731, -0.021403, -0.018731 + (conventions != "trl")]
    np.testing.assert_allclose(found.rewards, expected, atol=5e-7)


@pytest.mark.parametrize(
    ("conventions", "expected"),
    # d = [-30, 30]. k3 = [exp(30) - 31, 29 + exp(-30)], exp(30) = 1.0686475e13; with d bounded below: exp(20) - 21.
    [
        ("ours", [485165174.4, 29]),
        ("trl", [10686474581493.46, 29]),
        ("verl", [10, 10]),
        ("openrlhf", [10, 10]),
    ],
)
def test_bounds_of_k3_under_each_convention(conventions: str, expected: list[float]) -> None:
    extreme = responses([[-31, -1]], [[-1, -31]], [[0, 0]], [0.0])
    found = estimated(extreme, conventions=conventions, kl_estimator="k3", kl_coef=1.0, gae_lambda=0.0)
    np.testing.assert_allclose(-found.estimates.rewards, expected, rtol=1e-9)


@pytest.mark.parametrize(("estimator", "free", "bounded"), [("k1", [-30, 30], [-10, 10]), ("k2", [450, 450], [10, 10])])
def test_only_openrlhf_bounds_k1_and_k2(estimator: str, free: list[float], bounded: list[float]) -> None:
    extreme = responses([[-31, -1]], [[-1, -31]], [[0, 0]], [0.0])
    for conventions in ("ours", "trl", "verl", "openrlhf"):
        found = estimated(extreme, conventions=conventions, kl_estimator=estimator, kl_coef=1.0).estimates
        np.testing.assert_array_equal(-found.rewards, bounded if conventions == "openrlhf" else free)


def test_a_response_that_fills_max_new_tokens_has_no_slot() -> None:
    found = estimated(responses(**GOLDEN), conventions="trl", max_new_tokens=3).estimates
    np.testing.assert_allclose(found.advantages, AT_LAST, rtol=1e-9, atol=0)
    np.testing.assert_array_equal(found.bootstrap_returns, [np.nan])


def test_slots_of_several_responses_stay_with_their_responses() -> None:
    # gamma and lambda 1: A = total - V; the slot's return is the score. max_new_tokens 2: row 1 has no slot, row 2 no
    # token, hence no slot either.
    rows: list[list[float]] = [[-1], [-1, -1], [], [-1]]
    found = estimated(
        responses(rows, rows, [[0.5], [0.25, 0.75], [], [2]], [1.0, 2.0, 7.0, 3.0], bootstrap=[9.0, 9.0, 9.0, 8.0]),
        conventions="trl",
        max_new_tokens=2,
        gae_lambda=1.0,
    ).estimates
    np.testing.assert_allclose(found.advantages, [0.5, 1.75, 1.25, 1.0], rtol=1e-12)
    np.testing.assert_allclose(found.returns, [1, 2, 2, 3], rtol=1e-12)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.bootstrap_returns, [1, np.nan, np.nan, 3], rtol=1e-12)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.rewards, [0, 0, 2, 0])


def test_without_a_critic_there_is_no_slot() -> None:
    found = estimated(
        rewarded([1.0, 3.0], [0, 0], [2, 1]), conventions="trl", estimator="reinforce_plus_plus", gamma=0.5
    )
    np.testing.assert_allclose(found.estimates.advantages, [0.5, 1, 3], rtol=1e-12)
    assert found.estimates.returns is None and found.estimates.bootstrap_returns is None
    assert not {"returns/mean", "values/mean", "val/explained_variance"} & set(found.metrics)


def test_whitened_rewards_cover_the_slots_and_whitened_advantages_do_not() -> None:
    # Rewards [-0.01, 0.01, -0.01 | 1]: mean 0.2475, squares 1.0003, var (1.0003 - 4 * 0.2475^2) / 3 = 0.25175833.
    deviation = (0.25175833333333 + 1e-8) ** 0.5
    scaled = [(r - 0.2475) / deviation + 0.2475 for r in (-0.01, 0.01, -0.01, 1.0)]
    found = estimated(responses(**GOLDEN), conventions="trl", whiten_rewards=True, gae_lambda=0.0).estimates
    np.testing.assert_allclose(found.rewards, scaled[:3], rtol=1e-9)
    np.testing.assert_allclose(found.bootstrap_returns, scaled[3:], rtol=1e-9)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.advantages, [r + 0.1 for r in scaled[:3]], rtol=1e-9)


# --- the order of the steps, and what does not count --------------------------------------------------------------


def test_whitened_rewards_are_scaled_around_their_mean_before_gae() -> None:
    # mean 0.2425; lambda 0 and V(next) make A the TD error of the scaled rewards.
    mean = 0.97 / 4
    deviation = (sum((r - mean) ** 2 for r in REWARDS) / 4 + 1e-8) ** 0.5
    scaled = [(r - mean) / deviation + mean for r in REWARDS]
    found = run(whiten_rewards=True, gae_lambda=0.0)
    np.testing.assert_allclose(found.estimates.rewards, scaled, rtol=1e-9)
    expected = [scaled[0] + 0.5 - 0.3, scaled[1] + 0.2 - 0.5, scaled[2] - 0.2, scaled[3] - 0.1]
    np.testing.assert_allclose(found.estimates.advantages, expected, rtol=1e-9)
    assert found.metrics["objective/rlhf_reward"] == pytest.approx(0.485, rel=1e-9)


@pytest.mark.parametrize("rows", [[-1, 0, 1], [0, -1, 1], [0, 1, -1]])
@pytest.mark.parametrize("conventions", ["ours", "trl"])
def test_empty_responses_are_counted_and_leave_no_other_trace(rows: list[int], conventions: str) -> None:
    changes = {"conventions": conventions, "whiten_advantages": True, "score_scaling": "running_mean_std"}
    plain, found = run(**changes), run(rows, **changes)
    for a, b in zip(plain.estimates[:3], found.estimates[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found.metrics == {**plain.metrics, "advantages/empty_responses": 1}
    assert found.state == plain.state


def test_only_empty_responses() -> None:
    found = run([-1, -1], whiten_advantages=True, whiten_rewards=True)
    assert found.estimates.returns is not None
    assert found.estimates.advantages.shape == found.estimates.returns.shape == found.estimates.rewards.shape == (0,)
    ones = {"correction/ess": 1.0, "objective/kl_coef": 0.05}
    assert found.metrics == {**dict.fromkeys(found.metrics, 0), **ones, "advantages/empty_responses": 2}


def test_score_is_scaled_then_clipped_then_penalised() -> None:
    # Moments of earlier scores and this one are not needed here: clip(5, 2) = 2, minus 1 for not ending, minus
    # 0.5 * (1 - (4 - 4)) / 4 for being 1 token into a buffer of 4 below 4.
    one = responses([[0.0]], [[0.0]], [[0.0]], [5.0], finished=[False])
    found = estimated(
        one, score_clip=2.0, missing_eos_penalty=1.0, overlong_buffer=4, overlong_penalty=0.5, max_new_tokens=4
    )
    assert found.estimates.rewards.tolist() == [2 - 1 - 0.5 / 4]
    assert found.metrics["objective/scores_final"] == 0.875


def test_full_kl_replaces_the_estimate() -> None:
    rows = [[-1.0, -2.0]]
    found = estimated(
        responses(rows, rows, [[0, 0]], [0.0], full_kl=[[0.5, 12.0]]),
        kl_estimator="full",
        kl_coef=1.0,
        conventions="openrlhf",
    )
    np.testing.assert_array_equal(found.estimates.rewards, [-0.5, -12])
    assert found.metrics["objective/non_score_reward"] == -12.5


def test_columns_that_are_missing_are_named_with_what_makes_them() -> None:
    with pytest.raises(SchemaMismatch, match=r"no column full_kl: set score\.full_kl to true"):
        run(kl_estimator="full")
    for estimator in ("gae", "reward_minus_value"):
        with pytest.raises(
            SchemaMismatch, match=rf"{estimator}, but the scores have no column values: set critic\.kind"
        ):
            estimated(rewarded([1.0], [0]), estimator=estimator)


def test_the_lambda_of_the_returns_is_its_own() -> None:
    # Lambda 1 for returns: the rewards still to come, [1.48, 1.47, 1.475 | -0.51]; the advantages keep 0.95.
    found = run(value_gae_lambda=1.0).estimates
    np.testing.assert_allclose(found.advantages, ADVANTAGES, rtol=1e-9, atol=0)
    np.testing.assert_allclose(found.returns, [1.48, 1.47, 1.475, -0.51], rtol=1e-9, atol=0)  # type: ignore[arg-type]


# --- estimators other than GAE ------------------------------------------------------------------------------------


def test_reward_minus_value() -> None:
    # R = 0.01 - 0.005 + 1.475 = 1.48 and -0.51; the critic learns the rewards still to come.
    found = run(estimator="reward_minus_value").estimates
    np.testing.assert_allclose(found.advantages, [1.18, 0.98, 1.28, -0.61], rtol=1e-9)
    np.testing.assert_allclose(found.returns, [1.48, 1.47, 1.475, -0.51], rtol=1e-9)  # type: ignore[arg-type]


def test_reinforce_plus_plus_is_the_discounted_reward_to_go() -> None:
    # gamma 0.5: 1.475; -0.005 + 0.7375 = 0.7325; 0.01 + 0.36625 = 0.37625. The critic learns the same.
    found = run(estimator="reinforce_plus_plus", gamma=0.5).estimates
    np.testing.assert_allclose(found.advantages, [0.37625, 0.7325, 1.475, -0.51], rtol=1e-9)
    np.testing.assert_allclose(found.returns, found.advantages, rtol=1e-12)  # type: ignore[arg-type]


# Groups 5: R = [1, 2, 6] (mean 3, squares 4 + 1 + 9, std sqrt(14 / 2)); 9: one; 7: R = [4, 4]. Rows mixed.
TOTALS, GROUPS = [1.0, 8.0, 4.0, 2.0, 6.0, 4.0], [5, 9, 7, 5, 5, 7]
STD = 7**0.5


@pytest.mark.parametrize(
    ("estimator", "conventions", "expected"),
    [
        ("rloo", "ours", [1 - 4, 0, 0, 2 - 3.5, 6 - 1.5, 0]),
        ("grpo", "ours", [-2 / (STD + 1e-4), 0, 0, -1 / (STD + 1e-4), 3 / (STD + 1e-4), 0]),
        ("grpo", "trl", [-2 / (STD + 1e-4), 0, 0, -1 / (STD + 1e-4), 3 / (STD + 1e-4), 0]),
        ("grpo", "verl", [-2 / (STD + 1e-6), 0, 0, -1 / (STD + 1e-6), 3 / (STD + 1e-6), 0]),
        ("grpo", "openrlhf", [-2 / (STD + 1e-9), 0, 0, -1 / (STD + 1e-9), 3 / (STD + 1e-9), 0]),
        ("dr_grpo", "ours", [-2, 0, 0, -1, 3, 0]),
        ("reinforce_plus_plus_baseline", "ours", [-2, 0, 0, -1, 3, 0]),
    ],
)
def test_group_estimators_by_hand(estimator: str, conventions: str, expected: list[float]) -> None:
    found = estimated(rewarded(TOTALS, GROUPS), estimator=estimator, conventions=conventions)
    np.testing.assert_allclose(found.estimates.advantages, expected, rtol=1e-12, atol=0)
    counts = {name: found.metrics[f"advantages/{name}"] for name in ("groups", "groups_of_one", "constant_groups")}
    assert counts == {"groups": 3, "groups_of_one": 1, "constant_groups": 1}


def test_every_token_of_a_response_gets_its_advantage_and_empty_ones_are_in_no_group() -> None:
    # Group 0: R = [1, 3], the empty response's 7 does not count; RLOO: [1 - 3, 3 - 1].
    found = estimated(rewarded([1.0, 7.0, 3.0], [0, 0, 0], [2, 0, 3]), estimator="rloo")
    np.testing.assert_array_equal(found.estimates.advantages, [-2, -2, 2, 2, 2])
    # A group of empty responses is none.
    found = estimated(rewarded([1.0, 7.0], [0, 1], [1, 0]), estimator="rloo")
    assert (found.metrics["advantages/groups"], found.metrics["advantages/groups_of_one"]) == (1, 1)


def test_group_advantages_count_the_kl_of_all_tokens() -> None:
    # Group of two: R = 1 - 0.5 * (0.2 - 0.4) = 1.1 and 2 - 0.5 * 1 = 1.5; RLOO: -0.4 and 0.4.
    found = estimated(
        responses([[-1, -1], [-1]], [[-1.2, -0.6], [-2]], None, [1.0, 2.0], groups=[3, 3]),
        estimator="rloo",
        kl_coef=0.5,
    )
    np.testing.assert_allclose(found.estimates.advantages, [-0.4, -0.4, 0.4], rtol=1e-12)


@pytest.mark.parametrize("value", [0.1, 1e8 / 3, -0.7])
@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_equal_totals_give_exactly_zero(estimator: str, value: float) -> None:
    found = estimated(rewarded([value] * 7, [0] * 7), estimator=estimator)
    np.testing.assert_array_equal(found.estimates.advantages, np.zeros(7))
    assert found.metrics["advantages/constant_groups"] == 1


def test_group_estimators_train_a_critic_where_there_is_one() -> None:
    found = run(estimator="rloo").estimates
    np.testing.assert_array_equal(found.advantages, np.zeros(4))
    np.testing.assert_allclose(found.returns, [1.48, 1.47, 1.475, -0.51], rtol=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("conventions", ["ours", "trl", "verl", "openrlhf"])
@pytest.mark.parametrize(
    "estimator", ["gae", "rloo", "grpo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_where_every_response_earned_the_same_nothing_is_to_be_learnt(estimator: str, conventions: str) -> None:
    # The rounded mean of three scores of 0.1 is 0.10000000000000002: a difference that a division by a deviation of 0,
    # with 1e-9 added, would make an advantage of 1e-8, and whitening one of 1.
    lengths = [1, 2, 3, 1, 5, 2, 1]
    tokens = [[-1.0] * length for length in lengths]
    values = [[0.1] * length for length in lengths]
    batch = responses(tokens, tokens, values, [0.1] * 7, bootstrap=[0.1] * 7, groups=[0, 0, 0, 1, 1, 1, 1])
    for whiten in (True, False) if estimator != "reinforce_plus_plus" else (True,):
        found = estimated(batch, estimator=estimator, conventions=conventions, whiten_advantages=whiten)
        assert not found.estimates.advantages.any()
