"""A replayed iteration: every byte compared, the stage at fault named, and how much it differs by.

Mutations that must fail here: later stages given the replayed outs; an out linked into the copy instead of left out;
the largest difference taken without its absolute value; ids and texts covered by a tolerance.
"""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core import replay as module
from rlhf_core.differences import file_differences
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.replay import described, replay, run_again, stage_outs, within

ROOT = Path(__file__).parents[2]
# Two stages without a model, quick to start; the second adds to what the first wrote. Both read what a test changes.
ROLLOUT = """
import json, os, sys
key, prev = sys.argv[1:]
noise = json.load(open("data/noise.json"))
assert os.path.exists(f"data/checkpoints/policy/{prev}/weights")
os.makedirs(f"data/rollouts/iteration={key}"), os.makedirs("data/metrics/rollout", exist_ok=True)
row = {"id": noise["text"], "logprob": -2.0 + noise["rollout"]}
json.dump(row, open(f"data/rollouts/iteration={key}/part.json", "w"))
json.dump({"rollout/tokens": 2}, open(f"data/metrics/rollout/{key}.json", "w"))
"""
SCORE = """
import json, os, sys
key, noise = sys.argv[1], json.load(open("data/noise.json"))
row = json.load(open(f"data/rollouts/iteration={key}/part.json"))
os.makedirs(f"data/scores/iteration={key}"), os.makedirs("data/metrics/score", exist_ok=True)
os.makedirs("data/mismatch", exist_ok=True)
for path in (f"data/scores/iteration={key}/part.json", f"data/metrics/score/{key}.json", f"data/mismatch/{key}.json"):
    json.dump({"score": row["logprob"] + noise["score"]}, open(path, "w"))
"""
STAGES = ("rollout", "score")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose iteration 2 has run."""
    root = tmp_path / "project"
    for name in ("stages", "data/checkpoints/policy/1", "data/checkpoints/policy/0", "data/rollouts/iteration=1"):
        (root / name).mkdir(parents=True)
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, root / name)
    entry = '  "{}": {{prev: "{}", rollout: {{}}, score: {{}}, advantages: {{}}, ppo_update: {{}}}}\n'
    (root / "iterations.yaml").write_text("iterations:\n" + entry.format(1, 0) + entry.format(2, 1))
    (root / "data/checkpoints/policy/1/weights").touch()
    (root / "stages/__init__.py").touch()
    (root / "stages/rollout.py").write_text(ROLLOUT)
    (root / "stages/score.py").write_text(SCORE)
    noise(root)
    for stage in STAGES:
        module.run(stage, "2", "1", root)
    return root


def noise(root: Path, *, rollout: float = 0.0, score: float = 0.0, text: str = "b") -> None:
    (root / "data/noise.json").write_text(json.dumps({"rollout": rollout, "score": score, "text": text}))


def again(project: Path) -> list[module.Outcome]:
    copy = project / ".work/copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    return replay(project, "2", STAGES, copy, lambda outcome: None)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (root / "data").rglob("*") if path.is_file()}


def test_a_run_that_repeats_itself(project: Path) -> None:
    before = contents(project)
    outcomes = again(project)
    assert [(outcome.stage, outcome.outs, outcome.changed) for outcome in outcomes] == [
        ("rollout@2", 2, ()),
        ("score@2", 3, ()),
    ]
    assert described(outcomes[0], None).startswith("rollout@2: 2 outs, the same bytes")
    assert "unknown for the recorded run" in described(outcomes[0], None)  # these stages leave no record
    assert contents(project) == before


def test_the_stage_at_fault_is_named_and_those_that_follow_are_not(project: Path) -> None:
    before = contents(project)
    noise(project, rollout=0.25)
    rollout, score = again(project)
    assert [(item.part, item.text, item.largest) for item in rollout.differences] == [
        ("logprob", "-2.0 against -1.75", 0.25)
    ]
    assert rollout.changed == ("data/rollouts/iteration=2",)
    assert score.changed == ()
    assert {path: text for path, text in contents(project).items() if "noise" not in path} == {
        path: text for path, text in before.items() if "noise" not in path
    }


def test_a_later_stage_is_found_too_and_a_tolerance_covers_floats_only(project: Path) -> None:
    noise(project, score=0.01)
    rollout, score = again(project)
    assert rollout.changed == ()
    assert [item.part for item in score.differences] == ["score", "score", "score"]  # of three outs
    assert not within(score, None) and not within(score, 0.001) and within(score, 0.02)
    assert "DIFFER\n" in described(score, None) and "by at most 0.02, which is allowed" in described(score, 0.02)
    noise(project, text="c")
    assert not within(again(project)[0], 1e9)


def test_on_a_gpu_the_bound_is_stated(project: Path) -> None:
    noise(project, score=0.01)
    score = again(project)[1]
    on_gpu = module.Outcome(score.stage, score.outs, score.changed, score.differences, (), gpu=True)
    assert within(on_gpu, None) and not within(on_gpu, 0.0)
    assert "by at most 0.05, which is allowed" in described(on_gpu, None)


def test_what_cannot_be_replayed_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration, stages, words in [
        ("0", STAGES, "no such iteration; expected one of 1, 2"),
        ("7", STAGES, "no such iteration"),
        ("2", ("train_rm",), "expected some of rollout"),
    ]:
        with pytest.raises(ConfigError, match=words):
            module.check(project, iteration, stages)
    with pytest.raises(RlhfError, match="dvc repro advantages@2"):
        module.check(project, "2", ("advantages",))
    monkeypatch.setattr(module, "changed_since", lambda *_: ["score@2"])
    with pytest.raises(RlhfError, match="score@2: changed since it ran; run `dvc repro` first"):
        run_again(project, "2", STAGES, tolerance=None, keep=False, tell=lambda text: None)


def test_the_command_tells_and_leaves_nothing_behind(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "changed_since", lambda *_: [])
    told: list[str] = []
    noise(project, rollout=0.25)
    assert not run_again(project, "2", STAGES, tolerance=None, keep=False, tell=told.append)
    assert told[-1] == "rollout@2 is the first stage that does not repeat itself"
    assert run_again(project, "2", STAGES, tolerance=0.5, keep=False, tell=told.append)
    assert list((project / ".work").iterdir()) == []
    assert run_again(project, "2", STAGES, tolerance=0.5, keep=True, tell=told.append)
    assert [told[-1]] == [f"the copy is in {path}" for path in (project / ".work").iterdir()]


def test_a_stage_that_fails_is_named(project: Path) -> None:
    (project / "stages/score.py").write_text("raise SystemExit(3)")
    with pytest.raises(RlhfError, match=r"score@2 ended with exit code 3 when it was replayed"):
        again(project)


def test_outs_are_those_of_dvc_yaml() -> None:
    assert [path.as_posix() for path in stage_outs(ROOT, "ppo_update", "7")] == [
        "data/checkpoints/policy/7",
        "data/checkpoints/critic/7",
        "data/checkpoints/optimizer/7",
        "data/metrics/ppo_update/7.json",
        "data/plots/ppo_update/7.csv",
    ]


# --- what differs in a file ---------------------------------------------------------------------------------------


def parts(one: Path, other: Path) -> list[tuple[str, str, float | None]]:
    return [(item.part, item.text, item.largest) for item in file_differences(one, other, "f")]


def test_columns_of_parquet(tmp_path: Path) -> None:
    table = pa.table({"id": ["a", "b"], "ids": [[1, 2], [3]], "x": pa.array([1.0, -1.0], pa.float32())})
    other = pa.table({"id": ["a", "c"], "ids": [[1], [2, 3]], "x": pa.array([1.0, -1.5], pa.float32())})
    one, two = tmp_path / "1.parquet", tmp_path / "2.parquet"
    pq.write_table(table, one), pq.write_table(other, two)
    assert parts(one, two) == [
        ("id", "differs in 1 of 2 values", None),
        ("ids (lengths)", "differs in 2 of 2 values", None),
        ("x", "differs in 1 of 2 values, by at most 0.5", 0.5),
    ]
    assert parts(one, one) == []
    pq.write_table(table.slice(0, 1).drop_columns(["x"]), two)
    assert [part for part, *_ in parts(one, two)] == ["id", "ids (lengths)", "ids", "x"]


def test_tensors_of_safetensors_bfloat16_among_them(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)}
    save_file(tensors, one)
    save_file({**tensors, "b": torch.tensor([1.0, -2.5], dtype=torch.bfloat16)}, two)
    assert parts(one, two) == [("b", "differs in 1 of 2 values, by at most 0.5", 0.5)]


def test_keys_of_json_and_anything_else(tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    one.write_text('{"a": 1.0, "b": "x"}'), two.write_text('{"a": 1.25, "c": "x"}')
    assert parts(one, two) == [
        ("a", "1.0 against 1.25", 0.25),
        ("b", "is in one of the two only", None),
        ("c", "is in one of the two only", None),
    ]
    one.write_text('{"a": 1}'), two.write_text('{"a":  1}')
    assert parts(one, two) == [("", "differs in its bytes", None)]
    one, two = tmp_path / "1.md", tmp_path / "2.md"
    one.write_text("a"), two.write_text("b")
    assert parts(one, two) == [("", "differs in its bytes", None)]
