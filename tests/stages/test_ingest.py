"""The ingest stage as its own process, on files written here and a tiny tokenizer.

Mutations that must fail here: the hash of one source in the other artifact; an artifact of a run that failed; the split
read from the wrong table; shards of an interrupted run left in place.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.schema import PREFERENCES
from rlhf_core.artifacts.shards import read_metadata, read_table, shard_name
from rlhf_core.errors import ConfigError, DataError
from stages import ingest as stage
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
PROMPTS, PAIRS = Path("data/prompts"), Path("data/preferences")
METRICS = Path("data/metrics/ingest.json")


def write_jsonl(path: str, rows: list[dict]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def set_params(**keys) -> None:
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text())
    params["ingest"].update(keys)
    if params["ingest"]["preferences"] is None:
        params["rewards"] = {"judge": {"kind": "judge", "weight": 1.0}}
    with Path("params.yaml").open("w") as handle:
        yaml.dump(params, handle)


def prompt(text: str, **keys) -> dict:
    return {"prompt": [{"role": "user", "content": text}], **keys}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a tokenizer, four prompts and four pairs."""
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer().save_pretrained("data/checkpoints/policy/0")
    (tmp_path / "iterations.yaml").write_text((ROOT / "iterations.yaml").read_text())
    set_params()
    sides = ("train", "train", "eval", "eval")
    write_jsonl("data/raw/prompts.jsonl", [prompt(f"p{index}", split=side) for index, side in enumerate(sides)])
    pairs = [
        prompt(
            f"q{index}",
            split=side,
            chosen=[{"role": "assistant", "content": "good"}],
            rejected=[{"role": "assistant", "content": "bad"}],
        )
        for index, side in enumerate(sides)
    ]
    write_jsonl("data/raw/preferences.jsonl", pairs)
    return tmp_path


def test_writes_both_artifacts_and_the_counts(project):
    stage.main()
    prompts, pairs = read_table(PROMPTS), read_table(PAIRS)
    assert [turns[0]["content"] for turns in prompts["messages"].to_pylist()] == ["p0", "p1", "p2", "p3"]
    assert prompts["split"].to_pylist() == pairs["split"].to_pylist() == ["train", "train", "eval", "eval"]
    # "good" and "bad" have no merges but "a" and "b" are apart: one id a letter, ord - 28, and <eos>.
    assert pairs["response_ids"][0].as_py() == [[75, 83, 83, 72, 2], [70, 69, 72, 2]]
    assert set(prompts["source"].to_pylist()) == {"data/raw/prompts.jsonl"}
    metrics = json.loads(METRICS.read_text())
    assert {key: value for key, value in metrics.items() if value} == {
        "prompts/train": 2,
        "prompts/eval": 2,
        "pairs/train": 2,
        "pairs/eval": 2,
    }
    assert metrics["dropped/duplicate_prompt"] == 0


def test_metadata_holds_the_hash_of_the_own_source_only(project):
    stage.main()
    tokenizer = hash_tokenizer(stage.POLICY)
    for directory, name in ((PROMPTS, "prompts"), (PAIRS, "preferences")):
        assert read_metadata(directory) == {
            "schema_version": 3,
            "stage": "ingest",
            "inputs": {f"data/raw/{name}.jsonl": hash_path(Path(f"data/raw/{name}.jsonl"))},
            "tokenizer": tokenizer,
        }


def test_runs_are_byte_identical_and_new_preferences_leave_the_prompts_alone(project):
    def content():
        return [(directory / shard_name(0)).read_bytes() for directory in (PROMPTS, PAIRS)]

    stage.main()
    first = content()
    stage.main()
    assert content() == first
    with Path("data/raw/preferences.jsonl").open("a") as handle:
        handle.write(json.dumps({"prompt": "new", "chosen": "a", "rejected": "b"}) + "\n")
    stage.main()
    assert content()[0] == first[0] and content()[1] != first[1]


def test_without_preferences_there_is_an_empty_shard(project):
    set_params(preferences=None)
    stage.main()
    table = read_table(PAIRS)
    assert (table.num_rows, table.schema) == (0, PREFERENCES)
    assert read_metadata(PAIRS)["inputs"] == {}


def test_pairs_depend_on_the_prompts_only_where_these_remove_some(project):
    with Path("data/raw/preferences.jsonl").open("a") as handle:
        pair = {"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]}
        handle.write(json.dumps(prompt("p3", split="train", **pair)) + "\n")
    stage.main()
    assert read_table(PAIRS).num_rows == 4
    assert json.loads(METRICS.read_text())["dropped/prompt_on_other_side"] == 1
    assert read_metadata(PAIRS)["inputs"] == {
        f"data/raw/{name}.jsonl": hash_path(Path(f"data/raw/{name}.jsonl")) for name in ("preferences", "prompts")
    }


def test_many_rows_go_to_several_shards(project, monkeypatch):
    monkeypatch.setattr(stage, "ROWS_PER_SHARD", 3)
    stage.main()
    assert sorted(path.name for path in PROMPTS.iterdir()) == [shard_name(0), shard_name(1)]
    assert [turns[0]["content"] for turns in read_table(PROMPTS)["messages"].to_pylist()] == ["p0", "p1", "p2", "p3"]


def test_shards_of_an_interrupted_run_are_removed(project):
    stage.write(PREFERENCES.empty_table(), PREFERENCES, PAIRS, {})
    (PAIRS / shard_name(1)).write_bytes((PAIRS / shard_name(0)).read_bytes())
    stage.write(PREFERENCES.empty_table(), PREFERENCES, PAIRS, {})
    assert [path.name for path in PAIRS.iterdir()] == [shard_name(0)]


def test_bad_row_stops_the_stage_and_leaves_nothing(project):
    write_jsonl("data/raw/preferences.jsonl", [{"prompt": "q", "chosen": "a", "rejected": 3}])
    with pytest.raises(DataError, match=r"data/raw/preferences.jsonl:1: expected chosen and rejected"):
        stage.main()
    assert not PROMPTS.exists() and not PAIRS.exists() and not METRICS.exists()


def test_one_sided_data_stops_the_stage(project):
    write_jsonl("data/raw/prompts.jsonl", [prompt("p", split="train")])
    with pytest.raises(ConfigError, match=r"data/raw/prompts.jsonl: 1 train and 0 eval prompts"):
        stage.main()


def test_trial_run_on_one_percent(project):
    set_params(fraction=0.01)
    stage.main()
    assert sorted(read_table(PROMPTS)["split"].to_pylist()) == ["eval", "train"]
    assert sorted(read_table(PAIRS)["split"].to_pylist()) == ["eval", "train"]


def test_error_of_the_process_is_one_line_without_a_traceback(project):
    Path("data/raw/prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": }\n')
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "stages.ingest"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DataError: data/raw/prompts.jsonl:2:12: not valid JSON: Expecting value" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_prompts():
    """Our own file: unique prompts, 384 to train on and 96 held out, eight topics held out whole."""
    from data.make_demo_data import EVAL_TOPICS, PROMPTS, TOPICS, prompt_rows

    rows = [json.loads(line) for line in (ROOT / PROMPTS).read_text(encoding="utf-8").splitlines()]
    assert rows == prompt_rows()
    texts = {row["prompt"][0]["content"]: row["split"] for row in rows}
    assert len(texts) == 480 and list(texts.values()).count("eval") == 96
    for topic in TOPICS[-EVAL_TOPICS:]:
        assert {side for text, side in texts.items() if topic in text} == {"eval"}


def test_demo_preferences():
    """Our own file: enough pairs, prompts of the prompt file on the same side, labels that the judge gives."""
    from data.make_demo_data import LEAST_MARGIN, PREFERENCES, prompt_rows
    from rlhf_core.reward.judge import judge

    path = ROOT / PREFERENCES
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(rows) >= 800 and path.stat().st_size < 1_000_000
    sides = {row["prompt"][0]["content"]: row["split"] for row in prompt_rows()}
    for row in rows:
        assert sides[row["prompt"][0]["content"]] == row["split"]
        # Whether a response was cut off is not in the file; being cut off takes 1 from either of the two scores, unless
        # its text lacks an end anyhow.
        scores = [judge(row[key][0]["content"], "stop") for key in ("chosen", "rejected")]
        possible = [scores[0] - scores[1] + shift for shift in (-1, 0, 1)]
        assert min(abs(row["margin"] - value) for value in possible) < 1e-3
        assert row["margin"] >= LEAST_MARGIN
