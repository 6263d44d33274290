"""The advantages stage on scores written by hand: columns, metrics, shards, faults.

Mutations that must fail here: whitening per shard; a shard's rows given another shard's tokens; finished and cut off
exchanged; metadata not carried on; output left behind by a run that failed; groups cut by shards; replayed scores in
the moments; the state of another iteration.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import ALIGNED, scores_schema
from rlhf_core.artifacts.shards import iter_tables, read_metadata, read_table, shard_name, write_shard
from rlhf_core.config import NEED_CRITIC, AdvantageParams, Params
from rlhf_core.errors import ArtifactError, NumericError, RlhfError, StaleInput
from rlhf_core.stage import write_json
from stages import advantages as stage
from stages.base_model import FIRST_REWARD_STATE
from tests.iteration import PLAIN

ROOT = Path(__file__).parents[2]
SCORES, OUT = Path("data/scores/iteration=1"), Path("data/advantages/iteration=1")
METRICS, STATES = Path("data/metrics/advantages/1.json"), Path("data/reward_state")
METADATA = {
    "stage": "score",
    "iteration": "1",
    "inputs": {"rollouts": "aa"},
    "temperature": 0.7,
    "eos_ids": [2],
    "tokenizer": "bb",
    "policy": "cc",
    "vllm": "0",
    "logprobs_mode": "processed_logprobs",
    "reference": "dd",
    "critic": "ee",
    "reward_model": "ff",
    "precision": "float32",
    "rewards": {"reward_model": 1.0},
    "sampling": {"max_new_tokens": 5},
}


def response(
    sample_id: str,
    logprobs: list[float],
    ref_logprobs: list[float],
    values: list[float],
    score: float,
    finish_reason: str = "stop",
    **changes: Any,
) -> dict[str, Any]:
    """One row of data/scores, with the columns that a critic and score.full_kl add."""
    return {
        "sample_id": sample_id,
        "prompt_id": "p",
        "sample_index": 0,
        "prompt": "say",
        "prompt_ids": [1, 5],
        "response": "x" * len(values),
        "response_ids": list(range(10, 10 + len(values))),
        "sampler_logprobs": logprobs,
        "finish_reason": finish_reason,
        "ground_truth": None,
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "full_kl": [0.5] * len(values),
        "values": values,
        "bootstrap_value": 0.25,
        "score_reward_model": score,
        "score": score,
        **changes,
    }


def token(sample_id: str, score: float, finish_reason: str = "stop") -> dict[str, Any]:
    """A response of one token without KL and with V = 0: its advantage is its score."""
    return response(sample_id, [-1.0], [-1.0], [0.0], score, finish_reason)


GOLDEN = [
    response("1-p0-0", [-1.2, -0.4, -2.0], [-1.0, -0.5, -2.5], [0.3, 0.5, 0.2], 1.5),
    response("1-p1-0", [-0.7], [-0.9], [0.1], -0.5),
]


def write_scores(
    *shards: list[dict[str, Any]],
    metadata: dict[str, Any] = METADATA,
    critic: bool = True,
    full_kl: bool = False,
    directory: Path = SCORES,
) -> None:
    schema = scores_schema(["reward_model"], critic=critic, full_kl=full_kl)
    for index, rows in enumerate(shards):
        kept = [{name: row[name] for name in schema.names} for row in rows]
        write_shard(directory / shard_name(index), pa.Table.from_pylist(kept, schema=schema), schema, metadata)


def write_params(*, conventions: str = "ours", critic: str = "shared", full_kl: bool = False, **changes: Any) -> None:
    yaml = YAML()
    params = yaml.load(ROOT / "params.yaml")
    params["conventions"], params["critic"]["kind"], params["score"]["full_kl"] = conventions, critic, full_kl
    params["rollout"] |= {"prompts_per_iteration": 8, "samples_per_prompt": 2}
    params["advantages"] = {**PLAIN, "whiten_advantages": True, **changes}
    yaml.dump(params, Path("params.yaml"))


def run(monkeypatch: pytest.MonkeyPatch, iteration: str, prev: str) -> None:
    monkeypatch.setattr(sys, "argv", ["advantages", iteration, prev])
    stage.main()


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty project with two iterations and the reward state that base_model writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["advantages", "1", "0"])
    entry = '"{}": {{prev: "{}", rollout: {{}}, score: {{}}, advantages: {{}}, ppo_update: {{}}}}'
    Path("iterations.yaml").write_text(f"iterations: {{{entry.format(1, 0)}, {entry.format(2, 1)}}}\n")
    write_params()
    write_json(STATES / "0.json", FIRST_REWARD_STATE)


def column(name: str, directory: Path = OUT) -> list[Any]:
    rows: list[Any] = read_table(directory, [name])[name].to_pylist()
    return rows


def metrics(iteration: str = "1") -> dict[str, float]:
    found: dict[str, float] = json.loads((METRICS.parent / f"{iteration}.json").read_text())
    return found


def state(iteration: str) -> Any:
    return json.loads((STATES / f"{iteration}.json").read_text())


def test_golden_rows_from_file_to_file() -> None:
    # The sums are in tests/unit/test_estimates.py.
    write_scores(GOLDEN)
    stage.main()
    expected = {
        "rewards": [[0.01, -0.005, 1.475], [-0.51]],
        "advantages": [[0.550794, 0.329763, 0.824670], [-1.705228]],
        "returns": [[1.3709375, 1.40625, 1.475], [-0.51]],
    }
    for name, rows in expected.items():
        for found, wanted in zip(column(name), rows, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert metrics()["objective/non_score_reward"] == pytest.approx(-0.015, rel=1e-5)
    assert metrics()["objective/rlhf_reward"] == pytest.approx(0.485, rel=1e-5)
    assert metrics()["advantages/mean"] == pytest.approx(0.66054688, rel=1e-5)
    assert column("importance_weights") == [[1, 1, 1], [1]]
    assert column("bootstrap_return") == [None, None]
    assert set(metrics()) == {
        "objective/kl_coef",
        "objective/non_score_reward",
        "objective/rlhf_reward",
        "objective/scores_final",
        "advantages/mean",
        "advantages/std",
        "returns/mean",
        "returns/std",
        "values/mean",
        "val/explained_variance",
        "advantages/tokens",
        "advantages/empty_responses",
        "correction/weight_mean",
        "correction/zeroed_fraction",
        "correction/truncated_fraction",
        "correction/rejected_responses",
        "correction/ess",
    }


def test_the_score_slot_of_trl_from_file_to_file() -> None:
    # The sums are in tests/unit/test_estimates.py; a second response fills max_new_tokens and has no slot.
    write_params(conventions="trl", whiten_advantages=False)
    slotted = response("1-p0-0", [-1, -2, -0.5], [-1.2, -1.8, -0.7], [0.1, 0.2, 0.3], 1.0, bootstrap_value=0.4)
    write_scores([response("1-p1-0", [-1.0] * 5, [-1.0] * 5, [0.0] * 5, 2.0), slotted])
    stage.main()
    np.testing.assert_allclose(column("advantages")[1], [0.79015, 0.737, 0.66], rtol=1e-6)
    np.testing.assert_allclose(column("returns")[1], [0.89015, 0.937, 0.96], rtol=1e-6)
    np.testing.assert_allclose(column("rewards")[1], [-0.01, 0.01, -0.01], rtol=1e-6)
    assert column("rewards")[0] == [0, 0, 0, 0, 2]
    assert column("bootstrap_return") == [None, 1.0]
    assert read_metadata(OUT)["conventions"] == "trl"


def test_whitening_runs_over_all_shards_and_an_empty_shard_is_harmless() -> None:
    write_scores([token("a", 1), token("b", 2), token("c", 3)], [token("d", 10)], [])
    stage.main()
    shards = [table["advantages"].to_pylist() for _, table in iter_tables(OUT)]
    flat = [[value for row in rows for value in row] for rows in shards]
    np.testing.assert_allclose(flat[0], [-0.848528, -0.565685, -0.282843], atol=1e-6)
    np.testing.assert_allclose(flat[1], [1.697056], atol=1e-6)
    assert flat[2] == []


@pytest.mark.parametrize(("estimator", "conventions"), [("gae", "ours"), ("gae", "trl"), ("grpo", "ours")])
def test_any_cut_into_shards_and_blocks_gives_the_same_numbers(
    estimator: str, conventions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*GOLDEN, token("1-p1-1", 3), response("e", [], [], [], 7.0), token("1-p0-1", -2, "length")]
    whiten_rewards = estimator == "gae"
    write_params(
        conventions=conventions, estimator=estimator, score_scaling="running_std", whiten_rewards=whiten_rewards
    )
    columns = {}
    for cuts, block in (([0, 5], 2**16), ([0, 5], 2), ([0, 1, 5], 1), ([0, 2, 3, 3, 5], 2**16)):
        monkeypatch.setattr(stage, "BLOCK", block)
        for path in SCORES.glob("*"):
            path.unlink()
        write_scores(*(rows[a:b] for a, b in itertools.pairwise(cuts)))
        stage.main()
        names = ("importance_weights", "rewards", "advantages", "returns", "bootstrap_return")
        columns[f"{cuts} {block}"] = {name: column(name) for name in names}, metrics(), state("1")
    first, *others = columns.values()
    assert all(other == first for other in others)


def test_earlier_columns_shards_and_order_are_carried_on() -> None:
    write_scores([token("b", 1), *GOLDEN], [token("a", 2)])
    before = dict(iter_tables(SCORES))
    stage.main()
    after = dict(iter_tables(OUT))
    assert list(after) == list(before)
    for name, table in before.items():
        assert after[name].select(table.column_names).equals(table)
        assert after[name].column_names == [
            *table.column_names,
            "importance_weights",
            "rewards",
            "advantages",
            "returns",
            "bootstrap_return",
        ]
        lengths = [len(ids) for ids in table["response_ids"].to_pylist()]
        for aligned in set(ALIGNED) & set(after[name].column_names):
            assert [len(row) for row in after[name][aligned].to_pylist()] == lengths


def test_metadata_is_carried_on_with_inputs_and_parameters() -> None:
    write_scores(GOLDEN)
    stage.main()
    found = read_metadata(OUT)
    assert found.pop("schema_version") == read_metadata(SCORES)["schema_version"]
    assert found.pop("inputs") == {
        "rollouts": "aa",
        "data/scores/iteration=1": hash_path(SCORES),
        "data/reward_state/0.json": hash_path(STATES / "0.json"),
    }
    assert found.pop("stage") == "advantages"
    assert found.pop("conventions") == "ours"
    parameters = found.pop("advantages")
    assert parameters["gae_lambda"] == 0.95 and parameters["kl_estimator"] == "k1"
    assert found == {key: value for key, value in METADATA.items() if key not in ("stage", "inputs")}


def test_a_response_without_tokens_stays_an_empty_list_and_leaves_no_trace_in_statistics() -> None:
    # gamma and lambda 1: row 0 has rewards [0, 1], V 0.5, so A = [0.5, 0.5]. The other row's score 7 goes nowhere.
    write_params(gae_lambda=1.0, whiten_advantages=False)
    write_scores([response("1-a", [-1, -1], [-1, -1], [0.5, 0.5], 1.0), response("1-b", [], [], [], 7.0, "length")])
    stage.main()
    assert column("rewards") == [[0, 1], []]
    assert column("advantages") == [[0.5, 0.5], []]
    assert column("returns") == [[1, 1], []]
    assert metrics()["advantages/empty_responses"] == 1
    assert metrics()["advantages/tokens"] == 2
    assert metrics()["objective/scores_final"] == 1


def test_unfinished_responses_pay_the_penalty_once_and_their_score_column_stays() -> None:
    write_params(missing_eos_penalty=1.0, whiten_advantages=False)
    write_scores([token("1-a", 0.4), token("1-b", 0.4), token("1-c", 0.4, "length")])
    stage.main()
    np.testing.assert_allclose(np.concatenate(column("rewards")), [0.4, 0.4, -0.6], rtol=1e-6)
    np.testing.assert_allclose(read_table(OUT, ["score"])["score"].to_numpy(), [0.4] * 3, rtol=1e-6)
    assert metrics()["objective/scores_final"] == pytest.approx(0.2 / 3, rel=1e-6)


def test_overrides_of_the_iteration_apply() -> None:
    text = Path("iterations.yaml").read_text()
    Path("iterations.yaml").write_text(text.replace("advantages: {}", "advantages: {kl_coef: 1.0}", 1))
    write_scores(GOLDEN)
    stage.main()
    assert metrics()["objective/non_score_reward"] == pytest.approx(-0.3, rel=1e-5)


def corrupt(name: str, value: Any) -> None:
    """Replace a column of the only shard behind the writer's back."""
    path = SCORES / shard_name(0)
    table = pq.read_table(path)
    index = table.column_names.index(name)
    pq.write_table(table.set_column(index, table.field(index), pa.array(value, table.field(index).type)), path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("score", lambda bad: [2, bad, 4, 6]),
        ("logprobs", lambda bad: [[-1], [bad], [-1], [-1]]),
        ("ref_logprobs", lambda bad: [[-1], [bad], [-1], [-1]]),
        ("values", lambda bad: [[0], [bad], [0], [0]]),
        ("bootstrap_value", lambda bad: [0, bad, 0, 0]),
        ("sampler_logprobs", lambda bad: [[-1], [bad], [-1], [-1]]),
    ],
)
def test_one_number_that_is_not_finite_stops_the_stage_by_row_and_column(name: str, make: Any, bad: float) -> None:
    write_scores([token(sample_id, score) for sample_id, score in zip("abcd", [2, 3, 4, 6], strict=True)])
    stage.main()
    published = hash_path(OUT), hash_path(STATES), METRICS.read_bytes()
    corrupt(name, make(bad))
    with pytest.raises(NumericError, match=rf"part-00000.*'b'.*{name}.*{bad}"):
        stage.main()
    assert (hash_path(OUT), hash_path(STATES), METRICS.read_bytes()) == published


def test_rewards_too_large_for_a_file_stop_the_stage() -> None:
    write_params(kl_estimator="k2", whiten_advantages=False)
    write_scores([response("a", [-3e38], [0.0], [0.0], 0.0)])
    with pytest.raises(NumericError, match=r"'a'\), column rewards"):
        stage.main()
    assert not OUT.exists()


# --- groups, corrections, replay ----------------------------------------------------------------------------------


def test_groups_are_by_prompt_and_iteration_wherever_their_rows_are() -> None:
    # Prompt "p-1": scores 1, 2, 6 in two shards (mean 3); "p": one response; "p-1" of iteration 0: another group of
    # one; the empty response of "p-1" is in no group.
    write_params(critic="none", estimator="dr_grpo", whiten_advantages=False)
    write_scores(
        [token("1-p-1-0", 1), token("1-p-0", 5)],
        [token("1-p-1-2", 6), token("0-p-1-0", 9), response("1-p-1-3", [], [], [], 100.0), token("1-p-1-1", 2)],
        critic=False,
    )
    stage.main()
    assert column("advantages") == [[-2], [0], [3], [0], [], [-1]]
    found = {name: metrics()[f"advantages/{name}"] for name in ("groups", "groups_of_one", "constant_groups")}
    assert found == {"groups": 3, "groups_of_one": 2, "constant_groups": 0}


def test_without_a_critic_there_are_no_returns() -> None:
    write_params(critic="none", estimator="rloo")
    write_scores([token("1-p-0", 1), token("1-p-1", 3)], critic=False)
    stage.main()
    names = next(iter_tables(OUT))[1].column_names
    assert names[-3:] == ["importance_weights", "rewards", "advantages"]
    assert not {"returns/mean", "returns/std", "values/mean", "val/explained_variance"} & set(metrics())


def test_importance_weights_are_written_and_do_not_touch_the_advantages() -> None:
    # exp(trainer - sampler) = exp(0.1), exp(1.3), exp(-1), 1; at most 2.
    trainer, sampler = [-1.0, -0.2, -3.0, -0.5], [-1.1, -1.5, -2.0, -0.5]
    write_scores([response("1-p-0", trainer, trainer, [0.0] * 4, 1.0, sampler_logprobs=sampler)])
    stage.main()
    plain = column("advantages")
    write_params(correction="truncate")
    stage.main()
    np.testing.assert_allclose(column("importance_weights")[0], [1.105171, 2, 0.367879, 1], atol=1e-6)
    assert column("advantages") == plain
    assert metrics()["correction/truncated_fraction"] == 0.25


def test_full_kl_is_read_only_where_it_is_there() -> None:
    write_params(full_kl=True, kl_estimator="full", kl_coef=1.0, whiten_advantages=False)
    write_scores([token("a", 0)], full_kl=True)
    stage.main()
    assert column("rewards") == [[-0.5]]
    write_scores([token("a", 0)])
    with pytest.raises(ArtifactError, match=r"no column full_kl: set score\.full_kl to true"):
        stage.main()


def test_replayed_responses_are_trained_on_and_are_no_news() -> None:
    # Own: score 2, d = 0.5. Replayed: score 10, d = -4: neither the objective, the moments nor the controller sees it.
    own = response("1-p-0", [-1.0], [-1.5], [0.0], 2.0)
    replayed = response("0-p-0", [-5.0], [-1.0], [0.0], 10.0)
    write_params(score_scaling="running_std", kl_controller="adaptive", kl_target=1.0, kl_horizon=10)
    write_scores([own], [replayed])
    stage.main()
    assert state("1")["scores"] == {"count": 1, "mean": 2.0, "m2": 0.0}
    # KL 0.5 of a target of 1: the error -0.5 counts as -0.2; 0.05 * (1 - 0.2 * 1 / 10).
    assert state("1")["kl_coef"] == pytest.approx(0.049, rel=1e-12)
    assert metrics()["objective/scores_final"] == 2.0
    assert metrics()["objective/non_score_reward"] == pytest.approx(-0.05 * 0.5, rel=1e-9)
    assert metrics()["advantages/tokens"] == 2
    write_scores([replayed], [replayed | {"sample_id": "0-p-1"}])
    with pytest.raises(NumericError, match="only replays"):
        stage.main()
    write_params(kl_controller="adaptive", kl_target=1.0, kl_horizon=10)
    stage.main()
    assert state("1") == FIRST_REWARD_STATE | {"kl_coef": 0.05}
    assert "objective/rlhf_reward" not in metrics()


@pytest.mark.parametrize("conventions", get_args(Params.model_fields["conventions"].annotation))
@pytest.mark.parametrize("estimator", get_args(AdvantageParams.model_fields["estimator"].annotation))
def test_every_estimator_runs_under_every_convention_with_and_without_a_critic(
    estimator: str, conventions: str
) -> None:
    rows = [response(f"1-p-{i}", [-1.0] * i, [-1.5] * i, [0.1] * i, i % 3) for i in range(5)]
    for critic in ("shared", "none"):
        if critic == "none" and estimator in NEED_CRITIC:
            continue
        write_params(critic=critic, conventions=conventions, estimator=estimator)
        write_scores(rows[:2], rows[2:], critic=critic != "none")
        stage.main()
        advantages = np.concatenate(column("advantages"))
        # Whitened, with n or n - 1 of its 10 tokens; or all 0, which nothing here is.
        assert np.isfinite(advantages).all() and 0.8 < advantages.std() < 1.1, critic
        assert ("returns" in next(iter_tables(OUT))[1].column_names) == (critic != "none")


# --- the state that passes from iteration to iteration ------------------------------------------------------------


def test_the_second_iteration_continues_the_state_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Iteration 1: scores 1 and 3: count 2, mean 2, m2 2, deviation 1: scaled (1 - 2) / 1 and (3 - 2) / 1.
    # Its KL is (4 + 2) / 2 = 3 nats a response, 50 % above 2, so the error is 0.2: 0.05 * (1 + 0.2 * 2 / 10) = 0.052.
    write_params(
        score_scaling="running_mean_std",
        kl_controller="adaptive",
        kl_target=2.0,
        kl_horizon=10,
        whiten_advantages=False,
    )
    write_scores([response("1-p-0", [-1.0], [-5.0], [0.0], 1.0), response("1-q-0", [-1.0], [-3.0], [0.0], 3.0)])
    run(monkeypatch, "1", "0")
    np.testing.assert_allclose(np.concatenate(column("rewards")), [-1 - 0.05 * 4, 1 - 0.05 * 2], rtol=1e-6)
    assert metrics()["objective/kl_coef"] == 0.05
    assert state("1")["scores"] == {"count": 2, "mean": 2.0, "m2": 2.0}
    assert state("1")["kl_coef"] == pytest.approx(0.052, rel=1e-12)
    # Iteration 2: scores 8 and 8: count 4, mean (1 + 3 + 8 + 8) / 4 = 5, m2 16 + 4 + 9 + 9 = 38: (8 - 5) / sqrt(9.5).
    # KL 1.8: error -0.1; 0.052 * (1 - 0.1 * 2 / 10) = 0.05096.
    second = Path("data/scores/iteration=2")
    rows = [response(name, [-1.0], [-2.8], [0.0], 8.0) for name in ("2-p-0", "2-q-0")]
    write_scores(rows, metadata={**METADATA, "iteration": "2"}, directory=second)
    run(monkeypatch, "2", "1")
    rewards = np.concatenate(column("rewards", Path("data/advantages/iteration=2")))
    np.testing.assert_allclose(rewards, [3 / 9.5**0.5 - 0.052 * 1.8] * 2, rtol=1e-6)
    assert metrics("2")["objective/kl_coef"] == pytest.approx(0.052, rel=1e-12)
    assert state("2")["scores"] == {"count": 4, "mean": 5.0, "m2": 38.0}
    assert state("2")["kl_coef"] == pytest.approx(0.05096, rel=1e-6)


def test_a_fixed_controller_and_no_scaling_hand_the_state_on_byte_by_byte() -> None:
    before = {"kl_coef": 0.123, "scores": {"count": 3, "mean": 0.1, "m2": 0.7}}
    write_json(STATES / "0.json", before)
    write_scores(GOLDEN)
    stage.main()
    assert (STATES / "1.json").read_bytes() == (STATES / "0.json").read_bytes()
    assert metrics()["objective/kl_coef"] == 0.05


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"kl_coef": 1, "scores": {"count": 1}}'])
def test_a_broken_reward_state_is_refused_by_name(text: str | None) -> None:
    write_scores(GOLDEN)
    (STATES / "0.json").unlink() if text is None else (STATES / "0.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"data/reward_state/0\.json: not a reward state"):
        stage.main()


# --- faults -------------------------------------------------------------------------------------------------------


def test_scores_of_another_iteration_are_refused() -> None:
    write_scores(GOLDEN, metadata={**METADATA, "iteration": "2"})
    with pytest.raises(StaleInput, match="holds iteration 2; run `dvc repro -f score@1`"):
        stage.main()


def test_missing_scores_and_unknown_iterations_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="data/scores/iteration=1: no such directory"):
        stage.main()
    monkeypatch.setattr(sys, "argv", ["advantages", "9", "0"])
    with pytest.raises(RlhfError, match="no iteration '9'"):
        stage.main()


def test_two_runs_write_the_same_bytes_and_a_second_run_replaces_the_first() -> None:
    write_scores(GOLDEN, [token("a", 3)])
    stage.main()
    first = hash_path(OUT), METRICS.read_bytes()
    stage.main()
    assert (hash_path(OUT), METRICS.read_bytes()) == first
    write_params(gae_lambda=0.5)
    stage.main()
    assert hash_path(OUT) != first[0]
    assert sorted(path.name for path in OUT.iterdir()) == [shard_name(0), shard_name(1)]


def test_it_runs_as_a_process_without_importing_torch() -> None:
    write_scores(GOLDEN)
    code = (
        "import runpy, sys; sys.argv = ['stages.advantages', '1', '0'];"
        "runpy.run_module('stages.advantages', run_name='__main__');"
        "heavy = {'torch', 'transformers', 'vllm'} & set(sys.modules); assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert column("rewards")[1] == [pytest.approx(-0.51, rel=1e-5)]
