"""The advantages stage on scores written by hand: columns, metrics, shards, faults.

Mutations that must fail here: whitening per shard; a shard's rows given another shard's tokens; finished and cut off
exchanged; metadata not carried on; output left behind by a run that failed.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import ALIGNED, scores_schema
from rlhf_core.artifacts.shards import iter_tables, read_metadata, read_table, shard_name, write_shard
from rlhf_core.errors import ArtifactError, NumericError, RlhfError, StaleInput
from stages import advantages as stage

ROOT = Path(__file__).parents[2]
SCORES, OUT = Path("data/scores/iteration=1"), Path("data/advantages/iteration=1")
METRICS = Path("data/metrics/advantages/1.json")
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
}


def response(
    sample_id: str,
    logprobs: list[float],
    ref_logprobs: list[float],
    values: list[float],
    score: float,
    finish_reason: str = "stop",
) -> dict[str, Any]:
    """One row of data/scores."""
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
        "values": values,
        "score_reward_model": score,
        "score": score,
    }


def token(sample_id: str, score: float, finish_reason: str = "stop") -> dict[str, Any]:
    """A response of one token without KL and with V = 0: its advantage is its score."""
    return response(sample_id, [-1.0], [-1.0], [0.0], score, finish_reason)


GOLDEN = [
    response("1-p0-0", [-1.2, -0.4, -2.0], [-1.0, -0.5, -2.5], [0.3, 0.5, 0.2], 1.5),
    response("1-p1-0", [-0.7], [-0.9], [0.1], -0.5),
]


def write_scores(*shards: list[dict[str, Any]], metadata: dict[str, Any] = METADATA) -> None:
    schema = scores_schema(["reward_model"])
    for index, rows in enumerate(shards):
        write_shard(SCORES / shard_name(index), pa.Table.from_pylist(rows, schema=schema), schema, metadata)


def write_params(**changes: Any) -> None:
    yaml = YAML()
    params = yaml.load(ROOT / "params.yaml")
    params["advantages"] = {
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "missing_eos_penalty": 0.0,
        "score_clip": None,
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "whiten_rewards": False,
        "whiten_advantages": True,
        **changes,
    }
    yaml.dump(params, Path("params.yaml"))


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty project with one iteration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["advantages", "1"])
    Path("iterations.yaml").write_text(
        'iterations: {"1": {prev: "0", rollout: {}, score: {}, advantages: {}, ppo_update: {}}}\n'
    )
    write_params()


def column(name: str) -> list[list[float]]:
    rows: list[list[float]] = read_table(OUT, [name])[name].to_pylist()
    return rows


def metrics() -> dict[str, float]:
    found: dict[str, float] = json.loads(METRICS.read_text())
    return found


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
    assert set(metrics()) == {
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
    }


def test_whitening_runs_over_all_shards_and_an_empty_shard_is_harmless() -> None:
    write_scores([token("a", 1), token("b", 2), token("c", 3)], [token("d", 10)], [])
    stage.main()
    shards = [table["advantages"].to_pylist() for _, table in iter_tables(OUT)]
    flat = [[value for row in rows for value in row] for rows in shards]
    np.testing.assert_allclose(flat[0], [-0.848528, -0.565685, -0.282843], atol=1e-6)
    np.testing.assert_allclose(flat[1], [1.697056], atol=1e-6)
    assert flat[2] == []


def test_any_cut_into_shards_gives_the_same_numbers() -> None:
    rows = [*GOLDEN, token("a", 3), response("e", [], [], [], 7.0), token("b", -2, "length")]
    columns = {}
    for cuts in ([0, 5], [0, 1, 5], [0, 2, 3, 3, 5]):
        for path in SCORES.glob("*"):
            path.unlink()
        write_scores(*(rows[a:b] for a, b in itertools.pairwise(cuts)))
        stage.main()
        columns[str(cuts)] = {name: column(name) for name in ("rewards", "advantages", "returns")}, metrics()
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
        assert after[name].column_names == [*table.column_names, "rewards", "advantages", "returns"]
        lengths = [len(ids) for ids in table["response_ids"].to_pylist()]
        for aligned in ALIGNED:
            assert [len(row) for row in after[name][aligned].to_pylist()] == lengths


def test_metadata_is_carried_on_with_inputs_and_parameters() -> None:
    write_scores(GOLDEN)
    stage.main()
    found = read_metadata(OUT)
    assert found.pop("schema_version") == read_metadata(SCORES)["schema_version"]
    assert found.pop("inputs") == {"rollouts": "aa", "scores": hash_path(SCORES)}
    assert found.pop("stage") == "advantages"
    parameters = found.pop("advantages")
    assert parameters["gae_lambda"] == 0.95 and parameters["kl_estimator"] == "k1"
    assert found == {key: value for key, value in METADATA.items() if key not in ("stage", "inputs")}


def test_a_response_without_tokens_stays_an_empty_list_and_leaves_no_trace_in_statistics() -> None:
    # gamma and lambda 1: row 0 has rewards [0, 1], V 0.5, so A = [0.5, 0.5]. The other row's score 7 goes nowhere.
    write_params(gae_lambda=1.0, whiten_advantages=False)
    write_scores([response("a", [-1, -1], [-1, -1], [0.5, 0.5], 1.0), response("b", [], [], [], 7.0, "length")])
    stage.main()
    assert column("rewards") == [[0, 1], []]
    assert column("advantages") == [[0.5, 0.5], []]
    assert column("returns") == [[1, 1], []]
    assert metrics()["advantages/empty_responses"] == 1
    assert metrics()["advantages/tokens"] == 2
    assert metrics()["objective/scores_final"] == 1


def test_unfinished_responses_pay_the_penalty_once_and_their_score_column_stays() -> None:
    write_params(missing_eos_penalty=1.0, whiten_advantages=False)
    write_scores([token("a", 0.4), token("b", 0.4), token("c", 0.4, "length")])
    stage.main()
    np.testing.assert_allclose(np.concatenate(column("rewards")), [0.4, 0.4, -0.6], rtol=1e-6)
    np.testing.assert_allclose(read_table(OUT, ["score"])["score"].to_numpy(), [0.4] * 3, rtol=1e-6)
    assert metrics()["objective/scores_final"] == pytest.approx(0.2 / 3, rel=1e-6)


def test_overrides_of_the_iteration_apply() -> None:
    Path("iterations.yaml").write_text(
        'iterations: {"1": {prev: "0", rollout: {}, score: {}, advantages: {kl_coef: 1.0}, ppo_update: {}}}\n'
    )
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
    ],
)
def test_one_number_that_is_not_finite_stops_the_stage_by_row_and_column(name: str, make: Any, bad: float) -> None:
    write_scores([token(sample_id, score) for sample_id, score in zip("abcd", [2, 3, 4, 6], strict=True)])
    stage.main()
    published = hash_path(OUT), METRICS.read_bytes()
    corrupt(name, make(bad))
    with pytest.raises(NumericError, match=rf"part-00000.*'b'.*{name}.*{bad}"):
        stage.main()
    assert (hash_path(OUT), METRICS.read_bytes()) == published


def test_rewards_too_large_for_a_file_stop_the_stage() -> None:
    write_params(kl_estimator="k2", whiten_advantages=False)
    write_scores([response("a", [-3e38], [0.0], [0.0], 0.0)])
    with pytest.raises(NumericError, match=r"'a'\), column rewards"):
        stage.main()
    assert not OUT.exists()


def test_scores_of_another_iteration_are_refused() -> None:
    write_scores(GOLDEN, metadata={**METADATA, "iteration": "2"})
    with pytest.raises(StaleInput, match="holds iteration 2; run `dvc repro -f score@1`"):
        stage.main()


def test_missing_scores_and_unknown_iterations_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="data/scores/iteration=1: no such directory"):
        stage.main()
    monkeypatch.setattr(sys, "argv", ["advantages", "9"])
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
        "import runpy, sys; sys.argv = ['stages.advantages', '1'];"
        "runpy.run_module('stages.advantages', run_name='__main__');"
        "heavy = {'torch', 'transformers', 'vllm'} & set(sys.modules); assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert column("rewards")[1] == [pytest.approx(-0.51, rel=1e-5)]
