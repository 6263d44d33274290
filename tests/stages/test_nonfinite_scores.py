"""score with a source that gives NaN or infinity: an error by default, or the response is left out and counted.

Mutations that must fail here: NaN turned into 0; the row kept; a NaN that was let through once taken for a score later.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from rlhf_core.artifacts.shards import iter_tables, read_table
from rlhf_core.errors import NumericError, RewardError
from rlhf_core.models.forward import sequence_scores
from stages import advantages, ppo_update, score
from tests.stages.test_reward_sources import HTTP, JUDGE, TRAINED
from tests.stub_server import serve
from tests.tiny_run import change, set_rewards, stage, write_policy, write_rollouts

MINE = {"kind": "python", "function": "mine:f"}
# By response: the second one of the first prompt has no score.
NAN = "return [{'0-0': 2.0, '0-1': float('nan'), '1-0': 4.0, '1-1': 6.0}[r['sample_id'][-3:]] for r in rows]"
NAMES = ["1-p0-0", "1-p1-0", "1-p1-1"]


@pytest.fixture
def four(function, monkeypatch):
    """Four responses of one token to two prompts, scored [2, NaN, 4, 6]; no KL (the policy is the reference), V = 0."""
    monkeypatch.setattr("tests.tiny_run.RESPONSES", [[80], [81], [82], [83]])
    function(NAN)
    for path in Path("data/rollouts/iteration=1").iterdir():
        path.unlink()
    write_rollouts()
    set_rewards(mine=MINE)
    change("score", nonfinite_scores="drop")
    change("advantages", missing_eos_penalty=0.0, gamma=1.0)
    return function


def column(stage_name: str, name: str, iteration: str = "1") -> list:
    return read_table(Path(f"data/{stage_name}/iteration={iteration}"))[name].to_pylist()


def metrics_of(stage_name: str, iteration: str = "1") -> dict[str, float]:
    return json.loads(Path(f"data/metrics/{stage_name}/{iteration}.json").read_text())


def require_finite(directory: Path) -> None:
    """Every number of every column is one."""
    for _, table in iter_tables(directory):
        for name in table.column_names:
            values = table[name].combine_chunks()
            values = values.flatten() if pa.types.is_list(values.type) else values
            if pa.types.is_floating(values.type):
                assert np.isfinite(values.drop_null().to_numpy()).all(), name


def test_statistics_are_over_the_finite_rows(four, monkeypatch, caplog):
    stage(score, monkeypatch, "1", "0")
    assert column("scores", "sample_id") == NAMES and column("scores", "score") == [2.0, 4.0, 6.0]
    found = metrics_of("score")
    assert found["dropped/nonfinite_score"] == 1 and found["score/responses"] == 3
    assert found["objective/scores"] == 4.0 and found["score/mine_mean"] == 4.0
    assert "the score of sample 1-p0-1 by source mine is not finite; it is dropped" in caplog.text
    # mean (2 + 4 + 6) / 3 = 4; population variance 8 / 3, so 2 / 1.632993 = 1.224745; with n - 1 it is 4, so 2 / 2 = 1.
    for variance, expected in (("population", 1.224745), ("bessel", 1.0)):
        change("advantages", whitening_variance=variance)
        stage(advantages, monkeypatch, "1", "0")
        assert column("advantages", "sample_id") == NAMES
        assert np.concatenate(column("advantages", "advantages")) == pytest.approx([-expected, 0, expected], abs=1e-6)
    for name, of_stage in (("scores", "score"), ("advantages", "advantages")):
        require_finite(Path(f"data/{name}/iteration=1"))
        assert all(math.isfinite(value) for value in metrics_of(of_stage).values())


def test_what_is_left_is_trained_on(four, monkeypatch):
    change("ppo_update", minibatch_size=2, ppo_epochs=1)
    for module in (score, advantages, ppo_update):
        stage(module, monkeypatch, "1", "0")
    found = metrics_of("ppo_update")
    assert found["optimizer_steps"] == 2 and found["episode"] == 3  # minibatches of two and of one
    assert all(math.isfinite(value) for value in found.values())


def test_the_group_of_a_dropped_response_is_smaller(four, monkeypatch):
    change("advantages", estimator="dr_grpo", whiten_advantages=False)
    for module in (score, advantages):
        stage(module, monkeypatch, "1", "0")
    assert np.concatenate(column("advantages", "advantages")) == pytest.approx([0, -1, 1])  # 4 and 6 around 5
    assert metrics_of("advantages")["advantages/groups_of_one"] == 1


def test_every_other_column_stays_with_its_row(four, monkeypatch):
    stage(score, monkeypatch, "1", "0")
    dropped = read_table(Path("data/scores/iteration=1")).to_pylist()
    four("return [7.0] * len(rows)")
    stage(score, monkeypatch, "1", "0")
    whole = read_table(Path("data/scores/iteration=1")).to_pylist()
    assert metrics_of("score")["dropped/nonfinite_score"] == 0
    kept = [row for row in whole if row["sample_id"] in NAMES]
    assert [{**row, "score": 7.0, "score_mine": 7.0} for row in dropped] == kept


def test_replayed_responses_are_dropped_and_counted_too(four, monkeypatch):
    change("score", replay=[1])
    change("advantages", correction="truncate")
    write_policy("1", noise=0.02)
    shutil.copytree("data/checkpoints/critic/0", "data/checkpoints/critic/1")
    write_rollouts("2", "1")
    stage(score, monkeypatch, "2", "1")
    assert column("scores", "sample_id", "2") == [*(name.replace("1-", "2-", 1) for name in NAMES), *NAMES]
    found = metrics_of("score", "2")
    assert (found["dropped/nonfinite_score"], found["score/responses"], found["replay/responses"]) == (2, 3, 3)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_by_default_the_row_is_named(four, monkeypatch, value):
    change("score", nonfinite_scores="error")
    four(NAN.replace("nan", value))
    with pytest.raises(RewardError, match=r"source mine, .*score of sample 1-p0-1 is .*nonfinite_scores: drop"):
        stage(score, monkeypatch, "1", "0")
    assert not Path("data/scores").exists()


def test_what_is_no_number_stays_an_error(four, monkeypatch):
    four("return ['nan'] * len(rows)")
    with pytest.raises(RewardError, match=r"source mine, .*score of sample 1-p0-0 is 'nan'"):
        stage(score, monkeypatch, "1", "0")


def test_without_any_response_left_the_stage_stops(four, monkeypatch):
    four("return [float('nan')] * len(rows)")
    with pytest.raises(NumericError, match="iteration 1: a source scored each of the 4 responses NaN or infinite"):
        stage(score, monkeypatch, "1", "0")
    assert not Path("data/scores").exists()


def test_infinity_from_a_source_of_weight_zero_counts_as_well(four, monkeypatch):
    four(NAN.replace("nan", "-inf"))
    set_rewards(
        size={"kind": "length", "min_tokens": 1, "max_tokens": 9, "falloff_tokens": 1}, mine={**MINE, "weight": 0.0}
    )
    stage(score, monkeypatch, "1", "0")
    assert column("scores", "score") == [1.0, 1.0, 1.0]


def test_a_service_is_dropped_by_the_same_rule(four, monkeypatch):
    def answer(number, content):
        texts = ["NaN" if row["sample_id"] == "1-p0-1" else "1.0" for row in content["rows"]]
        return 200, f'{{"scores": [{", ".join(texts)}]}}'.encode()

    with serve(answer) as stub:
        set_rewards(far={**HTTP, "url": stub.url})
        stage(score, monkeypatch, "1", "0")
        assert column("scores", "sample_id") == NAMES and len(stub.requests) == 3
        change("score", nonfinite_scores="error")  # what was let through before is no score now
        with pytest.raises(RewardError, match=r"source far, .*score of sample 1-p0-1 is nan"):
            stage(score, monkeypatch, "1", "0")


def test_a_judge_is_dropped_by_the_same_rule(four, monkeypatch):
    reply = {"choices": [{"message": {"content": "is nan"}}]}
    with serve(lambda number, content: (200, reply)) as stub:
        set_rewards(llm={**JUDGE, "base_url": stub.url.replace("/score", "/v1")}, mine=MINE)
        with pytest.raises(NumericError, match="each of the 4 responses"):
            stage(score, monkeypatch, "1", "0")
        assert len(stub.requests) == 4
        change("score", nonfinite_scores="error")
        four("return [1.0] * len(rows)")
        with pytest.raises(RewardError, match=r"source llm, .*sample 1-p0-0: .*nan in the reply is not from 0 to 9"):
            stage(score, monkeypatch, "1", "0")


def test_a_reward_model_s_nan_is_dropped_and_by_default_an_error(four, monkeypatch):
    def broken(model, batch, **options):
        scores = sequence_scores(model, batch, **options)
        return torch.where((batch.input_ids == 81).any(-1), torch.nan, scores)

    monkeypatch.setattr("rlhf_core.reward.passes.sequence_scores", broken)
    set_rewards(rm=TRAINED)
    stage(score, monkeypatch, "1", "0")
    assert column("scores", "sample_id") == NAMES
    require_finite(Path("data/scores/iteration=1"))
    change("score", nonfinite_scores="error")
    with pytest.raises(NumericError, match=r"score_rm of sample 1-p0-1 is not finite.*nonfinite_scores: drop"):
        stage(score, monkeypatch, "1", "0")
