"""score with every kind of reward source: columns, weights, metrics, and what is left when a source fails.

The tiny run's responses are all "text"; their lengths are 3, 4, 0, 2, 6 and 1 tokens, in two shards of three.

Mutations that must fail here: a weight left out; a source's scores taken for another's; a source that fails after the
models instead of before; finished shards scored again; the trained reward model for one with a path.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import ROLLOUTS
from rlhf_core.artifacts.shards import read_metadata, read_shard, read_table, shard_paths, write_shard
from rlhf_core.errors import ConfigError, DataError, ModelError, RewardError
from rlhf_core.reward.passes import Passes
from rlhf_core.reward.sandbox import missing_layers
from stages import score
from tests.bomb import bomb
from tests.stub_server import by_length, serve
from tests.tiny_run import set_rewards, stage

SCORES = Path("data/scores/iteration=1")
LENGTHS = [3, 4, 0, 2, 6, 1]
HTTP = {"kind": "http", "batch_size": 2, "timeout_s": 5.0, "retries": 0, "backoff_s": 0.0, "auth_env": None}
TRAINED = {"kind": "reward_model", "path": None}
JUDGE = {
    "kind": "llm_judge", "model": "m", "prompt": "{response}", "pattern": "is (.*)", "min_score": 0.0, "max_score": 9.0,
    "temperature": 0.0, "max_reply_tokens": 5, "concurrency": 2, "timeout_s": 5.0, "retries": 0, "backoff_s": 0.0,
    "auth_env": None,
}  # fmt: skip


def set_column(name: str, values: list) -> None:
    """Replace a column of the rollouts."""
    for index, path in enumerate(shard_paths(Path("data/rollouts/iteration=1"))):
        table, metadata = read_shard(path), read_metadata(path.parent)
        column = pa.array(values[3 * index : 3 * index + 3], ROLLOUTS.field(name).type)
        write_shard(path, table.set_column(ROLLOUTS.get_field_index(name), name, column), ROLLOUTS, metadata)


def no_model(monkeypatch) -> None:
    monkeypatch.setattr("rlhf_core.reward.passes.load_causal_lm", lambda *a, **k: pytest.fail("a model was loaded"))


def found(name: str) -> list[float]:
    return read_table(SCORES)[f"score_{name}"].to_pylist()


def test_every_rule_is_a_column_and_the_score_their_weighted_sum(project, monkeypatch):
    set_column("response", ["It is 7.", "It is 8.", "", '{"a": 1}', "7", "it is 7 7 7"])
    set_column("ground_truth", ["7"] * 6)
    set_rewards(
        says={"kind": "regex", "pattern": "It is", "match": "search", "weight": 1.0},
        exact={"kind": "exact_answer", "weight": 2.0},
        last={"kind": "last_number", "partial_credit": 0.7, "weight": -3.0},
        size={"kind": "length", "min_tokens": 2, "max_tokens": 3, "falloff_tokens": 2, "weight": 4.0},
        form={"kind": "json_format", "required_keys": ["a"], "weight": 5.0},
        again={"kind": "repetition", "ngram": 1, "weight": 0.0},
    )
    stage(score, monkeypatch, "1", "0")
    expected = {
        "says": [1, 1, 0, 0, 0, 0],
        "exact": [0, 0, 0, 0, 1, 0],
        "last": [1, 0.7 * (1 - 1 / 7), 0, 0.7 * (1 - 6 / 7), 1, 1],
        "size": [1, 0.5, 0, 1, 0, 0.5],  # lengths 3, 4, 0, 2, 6, 1
        "form": [0, 0, 0, 1, 0, 0],
        "again": [0] * 6,
    }
    for name, values in expected.items():
        assert found(name) == pytest.approx(values, abs=1e-6), name
    total = sum(w * np.array(expected[n]) for n, w in zip(expected, (1, 2, -3, 4, 5, 0), strict=True))
    assert read_table(SCORES)["score"].to_pylist() == pytest.approx(total.tolist(), abs=1e-5)
    metrics = json.loads(Path("data/metrics/score/1.json").read_text())
    assert metrics["score/says_mean"] == pytest.approx(2 / 6)
    assert metrics["score/says_std"] == pytest.approx(np.std([1, 1, 0, 0, 0, 0]))
    assert read_metadata(SCORES)["rewards"]["size"]["max_tokens"] == 3


def test_a_row_without_ground_truth_is_named(project, monkeypatch):
    set_column("ground_truth", ["1", "1", "1", "1", None, "1"])
    set_rewards(last={"kind": "last_number", "partial_credit": 0.0})
    no_model(monkeypatch)
    with pytest.raises(DataError, match=r"source last, data/.*00001.*: sample 1-p2-0: ground_truth is None"):
        stage(score, monkeypatch, "1", "0")
    assert not SCORES.exists()


@pytest.mark.parametrize("text", ["NaN", "{", "1e999", "[Infinity]"])
def test_a_ground_truth_that_is_no_json_is_named(project, monkeypatch, text):
    set_column("ground_truth", ["1", text, "1", "1", "1", "1"])
    set_rewards(last={"kind": "last_number", "partial_credit": 0.0})
    with pytest.raises(DataError, match=r"00000.*ground_truth of sample 1-p0-1 is .*expected JSON"):
        stage(score, monkeypatch, "1", "0")


# --- programs -----------------------------------------------------------------------------------------------------

LIMITS = {"seconds": 20.0, "memory_mb": 256, "disk_mb": 4, "processes": 4, "output_kb": 16}
RUNNING_SUM = {"tests": [{"stdin": "1 2 3\n", "stdout": "1 3 6"}, {"stdin": "5\n", "stdout": "5"}]}


def test_programs_are_scored_by_the_tests_they_pass_and_their_outcome_is_a_column(project, monkeypatch):
    if missing_layers():
        pytest.skip(f"this platform lacks {', '.join(missing_layers())}")
    right = "import itertools\nprint(*itertools.accumulate(map(int, input().split())))"
    responses = [right, f"Here:\n```python\n{right}\n```", "", "print(5)", "print(", "```js\nx\n```"]
    set_column("response", responses)
    set_column("ground_truth", [json.dumps(RUNNING_SUM)] * 6)
    set_rewards(tests={"kind": "code", **LIMITS, "workers": 2, "allow_unisolated": False, "weight": 2.0})
    stage(score, monkeypatch, "1", "0")
    assert found("tests") == [1, 1, 0, 0.5, 0, 0]
    table = read_table(SCORES)
    assert table["score"].to_pylist() == [2, 2, 0, 1, 0, 0]
    assert table["outcome_tests"].to_pylist() == ["ok", "ok", "no_code", "wrong", "error", "no_code"]
    names = table.column_names
    assert names.index("outcome_tests") == names.index("score_tests") + 1
    metrics = json.loads(Path("data/metrics/score/1.json").read_text())
    assert {name: metrics[f"score/tests_{name}"] for name in ("ok", "wrong", "error", "no_code")} == {
        "ok": 2, "wrong": 1, "error": 1, "no_code": 2,
    }  # fmt: skip


# --- reward models ------------------------------------------------------------------------------------------------


def test_several_reward_models_each_have_a_column(project, monkeypatch):
    other = Path("models/other")
    shutil.copytree("data/checkpoints/reward_model", other, ignore=shutil.ignore_patterns("lineage.json"))
    described = json.loads((other / "score_normalisation.json").read_text())
    (other / "score_normalisation.json").write_text(json.dumps({**described, "mean": described["mean"] - 1.0}))
    set_rewards(a=TRAINED, b={**TRAINED, "path": str(other), "weight": 0.5})
    stage(score, monkeypatch, "1", "0")
    assert np.subtract(found("b"), found("a")) == pytest.approx(np.full(6, 1 / described["std"]), rel=1e-3)
    assert read_metadata(SCORES)["reward_models"] == {
        "a": hash_path(Path("data/checkpoints/reward_model")),
        "b": hash_path(other),
    }


def test_a_hub_id_is_refused_before_anything_runs(project, monkeypatch):
    no_model(monkeypatch)
    set_rewards(a={**TRAINED, "path": "owner/model"})
    with pytest.raises(ModelError, match=r"rewards\.a\.path is owner/model, which is no directory.*hf download"):
        stage(score, monkeypatch, "1", "0")


def test_a_reward_model_in_a_pickle_is_refused_and_not_run(project, monkeypatch):
    other, marker = Path("models/other"), project / "MARK"
    shutil.copytree("data/checkpoints/reward_model", other)
    for path in other.glob("*.safetensors*"):
        path.unlink()
    (other / "pytorch_model.bin").write_bytes(bomb(marker))
    set_rewards(a={**TRAINED, "path": str(other)})
    with pytest.raises(ModelError, match="models/other"):
        stage(score, monkeypatch, "1", "0")
    assert not marker.exists()


# --- functions ----------------------------------------------------------------------------------------------------


def test_a_function_sees_the_rows_and_its_scores_are_a_column(function, monkeypatch):
    set_column("ground_truth", ['{"n": 2}', None, None, None, None, None])
    function("return [len(r['response_ids']) + 10 * (r['ground_truth'] or {'n': 0})['n'] for r in rows]")
    set_rewards(mine={"kind": "python", "function": "mine:f"})
    stage(score, monkeypatch, "1", "0")
    assert found("mine") == [23.0, 4.0, 0.0, 2.0, 6.0, 1.0]
    assert read_metadata(SCORES)["inputs"]["user_rewards"] == hash_path(Path("user_rewards"))


@pytest.mark.parametrize(
    "body, words",
    [
        (
            "return [1 / (r['sample_id'] != '1-p2-0') for r in rows]",
            r"00001.*raised at sample 1-p2-0: ZeroDivis",
        ),
        ("return [float('nan') if r['sample_id'] == '1-p0-1' else 0 for r in rows]", r"00000.*sample 1-p0-1 is nan"),
        ("return 1.0", r"00000.*returned float, expected a list of 3"),
        ("return [0.0]", r"00000.*returned 1 scores for 3 rows \(1-p0-0 to 1-p1-0\)"),
    ],
)
def test_a_function_that_fails_stops_the_stage_before_a_model_runs(function, monkeypatch, body, words):
    function(body)
    set_rewards(rm=TRAINED, mine={"kind": "python", "function": "mine:f"})
    no_model(monkeypatch)
    with pytest.raises(RewardError, match=f"reward source mine, data/rollouts/iteration=1/.*{words}"):
        stage(score, monkeypatch, "1", "0")
    assert not SCORES.exists()


def test_an_edited_function_is_run_anew(function, monkeypatch):
    set_rewards(mine={"kind": "python", "function": "mine:f"})
    for value in ("1.0", "2.0"):
        function(f"return [{value}] * len(rows)")
        stage(score, monkeypatch, "1", "0")
        assert found("mine") == [float(value)] * 6


def test_a_missing_function_is_named(function, monkeypatch):
    function("return []")
    set_rewards(mine={"kind": "python", "function": "mine:g"})
    with pytest.raises(ConfigError, match="has no function g; it has f"):
        stage(score, monkeypatch, "1", "0")


# --- services -----------------------------------------------------------------------------------------------------


def test_a_service_that_breaks_down_keeps_what_it_scored(project, monkeypatch):
    with serve(lambda number, content: by_length(number, content) if number < 3 else (500, b"")) as stub:
        set_rewards(far={**HTTP, "url": stub.url})
        with pytest.raises(RewardError, match=r"source far, .*00001.*, samples 1-p2-1 to 1-p2-1: .*status 500"):
            stage(score, monkeypatch, "1", "0")
        assert len(stub.requests) == 4 and not SCORES.exists()
        # Another way to reach it is no other configuration.
        set_rewards(far={**HTTP, "url": stub.url, "retries": 1, "timeout_s": 9.0, "batch_size": 50})
        monkeypatch.setattr(
            "rlhf_core.reward.http_service.reader", lambda ids, nonfinite: lambda answer: [7.0] * len(ids)
        )
        answers, stub.requests[:] = stub.requests[:], []
        stage(score, monkeypatch, "1", "0")
        assert len(answers) == 4 and [len(request["rows"]) for request in stub.requests] == [1]
    assert found("far") == [4.0] * 5 + [7.0]


def test_a_judge_at_an_endpoint_is_a_column(project, monkeypatch):
    reply = {"choices": [{"message": {"content": "It is 7"}}]}
    with serve(lambda number, content: (200, reply)) as stub:
        set_rewards(llm={**JUDGE, "base_url": stub.url.replace("/score", "/v1/")})
        stage(score, monkeypatch, "1", "0")
    assert found("llm") == [7.0] * 6
    assert stub.requests[0]["max_tokens"] == 5
    assert set(stub.paths) == {"/v1/chat/completions"}


def test_the_token_is_in_no_file(project, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cret-token")
    with serve(by_length) as stub:
        set_rewards(far={**HTTP, "url": stub.url, "auth_env": "MY_TOKEN"})
        stage(score, monkeypatch, "1", "0")
    assert stub.headers[0]["Authorization"] == "Bearer s3cret-token"
    assert not [path for path in Path().rglob("*") if path.is_file() and b"s3cret-token" in path.read_bytes()]


def test_sources_that_were_done_are_not_scored_again(project, monkeypatch):
    def killed(self, name, directory):
        raise KeyboardInterrupt

    with serve(by_length) as stub:
        set_rewards(far={**HTTP, "url": stub.url}, rm=TRAINED)
        with monkeypatch.context() as patched:
            patched.setattr(Passes, "reward_model", killed)
            with pytest.raises(KeyboardInterrupt):
                stage(score, patched, "1", "0")
        asked = len(stub.requests)
        stage(score, monkeypatch, "1", "0")
        assert len(stub.requests) == asked == 4
