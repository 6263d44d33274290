"""The rollout stage with a stand-in for vLLM: which prompts, resume, refusals.

Mutations that must fail here: the chain's position dropped; the seed of a shard without its number; a finished shard
sampled again; a broken shard kept; work of other parameters continued; the engine started when nothing is missing.
"""

import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ruamel.yaml import YAML

from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.artifacts.schema import PROMPTS, ROLLOUTS
from rlhf_core.artifacts.shards import read_metadata, read_table, shard_name, write_shard
from rlhf_core.errors import ConfigError, DataError, DiskError, ModelError, RlhfError, StaleInput
from rlhf_core.sampling import rollouts
from rlhf_core.sampling.engine import Sample
from rlhf_core.sampling.rollouts import Prompt, choose_prompts
from stages import rollout as stage
from tests.killed import kill_many_times, note, noted

ROOT = Path(__file__).parents[2]
OUT, METRICS = Path("data/rollouts/iteration=1"), Path("data/metrics/rollout/1.json")
TRAIN = [f"p{index}" for index in range(5)]


class Crash(Exception):
    """Stands for the process dying."""


class StubSampler:
    """Answers with the prompt's last id and one made of the seed; remembers what it was asked."""

    started = 0
    calls: list[dict[str, Any]] = []  # noqa: RUF012
    crash_after: int | None = None

    def __init__(self, model: Path, **options: Any) -> None:
        type(self).started += 1
        self.options = options

    def sample(
        self, prompt_ids: list[list[int]], *, n: int, names: Sequence[str], **options: Any
    ) -> list[list[Sample]]:
        if self.crash_after is not None and len(self.calls) >= self.crash_after:
            raise Crash
        self.calls.append({**self.options, "prompts": prompt_ids, "n": n, "names": names, **options})
        drawn = 5 + options["seed"] % 200
        return [[self.answer(ids[-1], index, drawn) for index in range(n)] for ids in prompt_ids]

    @staticmethod
    def answer(last: int, index: int, drawn: int) -> Sample:
        if index == 0:
            return Sample([last, drawn, 2], [-0.5, -0.25, -0.125], "stop")
        return Sample([last], [-0.75], "length")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubSampler]:
    class Fresh(StubSampler):
        started, calls, crash_after = 0, [], None

    monkeypatch.setattr(stage, "Sampler", Fresh)
    return Fresh


def set_params(changes: dict[str, dict[str, Any]]) -> None:
    """Write the project's params.yaml with what these tests rely on, and with these changes."""
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["seed"] = 0
    params["sampling"].update(SAMPLING)
    params["ppo_update"].update(minibatch_size=1)
    for section, values in changes.items():
        params[section].update(values)
    yaml.dump(params, Path("params.yaml"))


def set_iterations(entries: dict[str, tuple[str, dict[str, Any]]]) -> None:
    content = {
        name: {"prev": prev, "rollout": override, "score": {}, "advantages": {}, "ppo_update": {}}
        for name, (prev, override) in entries.items()
    }
    YAML().dump({"iterations": content}, Path("iterations.yaml"))


SAMPLING = {"temperature": 0.7, "max_new_tokens": 40, "dtype": "float32", "max_model_len": 1024, "kv_cache_gib": 1.0}
SMALL = {"prompts_per_iteration": 5, "samples_per_prompt": 2, "shard_prompts": 2}


def write_prompts(ids: dict[str, list[int]], tokenizer: str) -> None:
    rows = [
        {
            "prompt_id": name,
            "messages": None,
            "prompt": f"text of {name}",
            "prompt_ids": prompt_ids,
            "ground_truth": json.dumps({"answer": name}) if name == "p0" else None,
            "source": "x.jsonl",
            "split": "eval" if name.startswith("e") else "train",
        }
        for name, prompt_ids in ids.items()
    ]
    metadata = {"stage": "ingest", "tokenizer": tokenizer, "inputs": {}}
    write_shard(Path("data/prompts") / shard_name(0), pa.Table.from_pylist(rows), PROMPTS, metadata)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five training prompts and one held-out, two iterations, the tiny model as policy 0 and 1."""
    monkeypatch.chdir(tmp_path)
    for name in ("0", "1"):
        shutil.copytree(tiny_dir, f"data/checkpoints/policy/{name}")
    write_prompts({**{name: [1, 100 + i] for i, name in enumerate(TRAIN)}, "e0": [1, 99]}, hash_tokenizer(tiny_dir))
    set_params({"rollout": SMALL})
    set_iterations({"1": ("0", {}), "2": ("1", {})})
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, iteration: str = "1", prev: str = "0") -> None:
    monkeypatch.setattr(sys, "argv", ["rollout", iteration, prev])
    stage.main()


def test_room_for_all_samples_is_checked_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    # 5 prompts x 2 samples x (10 bytes of text + 2 ids of 4 + 40 tokens of 12) = 4980 bytes.
    for free in (4979, 4980):
        monkeypatch.setattr("rlhf_core.disk.free_bytes", lambda path, free=free: free)
        if free < 4980:
            with pytest.raises(DiskError, match="what is to be sampled takes about 4980 bytes, 4979 bytes are free"):
                run(monkeypatch)
            assert stub.started == 0
        else:
            run(monkeypatch)


# --- what is written ----------------------------------------------------------------------------------------------


def test_rows_columns_and_metadata(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    run(monkeypatch)
    table = read_table(OUT)
    assert table.schema.equals(ROLLOUTS) and table.num_rows == 10
    assert [path.name for path in sorted(OUT.iterdir())] == [shard_name(i) for i in range(3)]  # 2 + 2 + 1 prompts
    rows = {row["sample_id"]: row for row in table.to_pylist()}
    assert set(rows) == {f"1-p{i}-{j}" for i in range(5) for j in range(2)}  # none of split eval
    row = rows["1-p0-0"]
    assert (row["prompt"], row["prompt_ids"], row["sample_index"]) == ("text of p0", [1, 100], 0)
    assert json.loads(row["ground_truth"]) == {"answer": "p0"} and rows["1-p1-0"]["ground_truth"] is None
    for name, found in rows.items():  # each answer is at its own prompt and index
        _, prompt, index = name.split("-")
        assert found["response_ids"][0] == 100 + int(prompt[1]) == found["prompt_ids"][-1]
        assert (found["finish_reason"], len(found["response_ids"])) == (("stop", 3) if index == "0" else ("length", 1))
    metadata = read_metadata(OUT)
    policy = hash_path(Path("data/checkpoints/policy/0"))
    assert metadata["inputs"] == {"data/prompts": hash_path(Path("data/prompts")), "data/checkpoints/policy/0": policy}
    assert (metadata["stage"], metadata["iteration"], metadata["policy"]) == ("rollout", "1", policy)
    assert (metadata["temperature"], metadata["eos_ids"]) == (0.7, [2, 4])
    assert metadata["logprobs_mode"] == "processed_logprobs" and metadata["vllm"].startswith("vllm")
    assert metadata["tokenizer"] == hash_tokenizer(Path("data/checkpoints/policy/0"))


def test_the_text_is_the_ids_without_special_tokens(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    stub.answer = staticmethod(lambda last, index, drawn: Sample([69, 70, 225, 264, 2], [-0.5] * 5, "stop"))  # type: ignore[method-assign]
    run(monkeypatch)
    assert set(read_table(OUT)["response"].to_pylist()) == {"ab hello"}


def test_the_engine_is_asked_with_the_parameters(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    run(monkeypatch)
    assert stub.started == 1
    assert [len(call["prompts"]) for call in stub.calls] == [2, 2, 1]
    asked = stub.calls[0]
    assert {name: asked[name] for name in ("n", "temperature", "max_new_tokens", "eos_ids")} == {
        "n": 2,
        "temperature": 0.7,
        "max_new_tokens": 40,
        "eos_ids": [2, 4],
    }
    assert (asked["dtype"], asked["max_model_len"], asked["kv_cache_gib"]) == ("float32", 1024, 1.0)
    assert len({call["seed"] for call in stub.calls}) == 3
    assert all(name.startswith("prompt_id 'p") for call in stub.calls for name in call["names"])


def test_metrics_are_counts_and_means(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    answers = [Sample([7, 8, 2], [-0.5] * 3, "stop"), Sample([], [], "length")]
    stub.answer = staticmethod(lambda last, index, drawn: answers[index])  # type: ignore[method-assign]
    run(monkeypatch)
    assert json.loads(METRICS.read_text()) == {
        "rollout/responses": 10,
        "dropped/nonfinite_logprob": 0,
        "rollout/tokens": 15,
        "rollout/empty_responses": 5,
        "rollout/finished": 0.5,
        "rollout/response_length_mean": 1.5,
    }


def test_a_response_is_finished_by_either_of_two_end_ids(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    set_params({"rollout": {**SMALL, "samples_per_prompt": 3}})
    answers = [Sample([7, 2], [-0.5] * 2, "stop"), Sample([7, 4], [-0.5] * 2, "stop"), Sample([9], [-0.5], "length")]
    stub.answer = staticmethod(lambda last, index, drawn: answers[index])  # type: ignore[method-assign]
    run(monkeypatch)
    assert json.loads(METRICS.read_text())["rollout/finished"] == pytest.approx(2 / 3)  # one of three was cut off


def test_a_dropped_response_has_no_row_is_counted_and_does_not_make_its_shard_unfinished(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    set_params({"rollout": SMALL, "sampling": {"nonfinite_logprobs": "drop"}})
    answers = [Sample([7, 8, 2], [-0.5] * 3, "stop"), None]
    stub.answer = staticmethod(lambda last, index, drawn: answers[index])  # type: ignore[method-assign]
    run(monkeypatch)
    assert [row.rsplit("-", 1)[1] for row in read_table(OUT, ["sample_id"])["sample_id"].to_pylist()] == ["0"] * 5
    metrics = json.loads(METRICS.read_text())
    assert (metrics["rollout/responses"], metrics["dropped/nonfinite_logprob"]) == (5, 5)
    calls = len(stub.calls)
    run(monkeypatch)
    assert len(stub.calls) == calls


def test_a_missing_row_is_sampled_again_unless_rows_may_be_dropped(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    answers = [Sample([7, 8, 2], [-0.5] * 3, "stop"), None]
    stub.answer = staticmethod(lambda last, index, drawn: answers[index])  # type: ignore[method-assign]
    monkeypatch.setattr(stage, "publish", lambda work, out: None)
    run(monkeypatch)
    calls = len(stub.calls)
    run(monkeypatch)
    assert len(stub.calls) == 2 * calls


def test_seeds_depend_on_run_iteration_and_shard(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    run(monkeypatch)
    run(monkeypatch, "2", "1")
    assert len({call["seed"] for call in stub.calls}) == 6
    first = [call["seed"] for call in stub.calls[:3]]
    shutil.rmtree(OUT)
    run(monkeypatch)
    assert [call["seed"] for call in stub.calls[6:]] == first


# --- which prompts ------------------------------------------------------------------------------------------------


def taken(iteration: str) -> list[str]:
    ids = read_table(Path(f"data/rollouts/iteration={iteration}"), ["prompt_id"])["prompt_id"].to_pylist()
    return list(dict.fromkeys(ids))


def test_iterations_walk_through_all_prompts_before_any_comes_again(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    set_params({"rollout": {**SMALL, "prompts_per_iteration": 2}})
    # 1 -> 2 -> 3, where 2 takes one prompt only; 3b branches off 1.
    set_iterations({"1": ("0", {}), "2": ("1", {"prompts_per_iteration": 1}), "3": ("2", {}), "3b": ("1", {})})
    for name in ("2", "3"):
        shutil.copytree("data/checkpoints/policy/0", f"data/checkpoints/policy/{name}", dirs_exist_ok=True)
    for name, prev in (("1", "0"), ("2", "1"), ("3", "2"), ("3b", "1")):
        run(monkeypatch, name, prev)
    one, two, three, branch = (taken(name) for name in ("1", "2", "3", "3b"))
    assert sorted(one + two + three) == TRAIN  # 2 + 1 + 2 prompts: each once
    assert branch == [*two, three[0]]  # continues where its own chain stopped


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", "", [1], None) for index in range(count)]


def walk(count: int, sizes: list[int], seed: int = 0) -> list[list[str]]:
    position, found = 0, []
    for size in sizes:
        chosen = choose_prompts(prompts(count), seed=seed, position=position, count=size)
        found.append([prompt.prompt_id for prompt in chosen])
        position += size
    return found


def test_a_walk_wraps_around_without_taking_a_prompt_twice_in_one_iteration() -> None:
    found = walk(7, [3] * 7)
    assert all(len(set(ids)) == 3 for ids in found)
    assert Counter(name for ids in found for name in ids) == {f"p{index}": 3 for index in range(7)}
    assert set(found[0] + found[1] + found[2][:1]) == {f"p{index}" for index in range(7)}


def test_the_order_depends_on_the_seed_and_the_ids_only() -> None:
    assert walk(50, [50]) == walk(50, [50]) != walk(50, [50], seed=1)
    backwards = choose_prompts(prompts(50)[::-1], seed=0, position=0, count=50)
    assert [prompt.prompt_id for prompt in backwards] == walk(50, [50])[0]
    assert walk(50, [50])[0] != [f"p{index}" for index in range(50)]


def test_more_prompts_than_there_are_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    set_params({"rollout": {**SMALL, "prompts_per_iteration": 6}})
    with pytest.raises(ConfigError, match="prompts_per_iteration is 6, but data/prompts has 5 prompts of split train"):
        run(monkeypatch)
    assert stub.started == 0


# --- resume (NVIDIA-NeMo/RL#3599: prompts skipped; hiyouga/EasyR1#57: data repeated) --------------------------------


def crash(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler], after: int) -> Path:
    """Die after so many shards and return the directory of partial work."""
    stub.crash_after = after
    with pytest.raises(Crash):
        run(monkeypatch)
    stub.crash_after = None
    stub.calls.clear()
    [work] = Path(".work/rollout-1").glob("*/")
    assert not OUT.exists() and not METRICS.exists()
    return work


def test_a_restart_samples_only_what_is_missing(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    run(monkeypatch)
    whole = {path.name: path.read_bytes() for path in OUT.iterdir()}
    shutil.rmtree(".work")
    shutil.rmtree(OUT)
    METRICS.unlink()
    stub.calls.clear()

    work = crash(monkeypatch, stub, after=1)
    kept = (work / shard_name(0)).stat().st_mtime_ns
    run(monkeypatch)
    assert [len(call["prompts"]) for call in stub.calls] == [2, 1]
    assert (OUT / shard_name(0)).stat().st_mtime_ns == kept
    table = read_table(OUT)
    keys = set(zip(table["prompt_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
    assert table.num_rows == 10 and keys == {(name, index) for name in TRAIN for index in range(2)}
    # The four that the crash left score 1, the other six 0: 4 / 10, where 4 counted twice would give 8 / 14.
    assert [name in TRAIN[:2] for name in table["prompt_id"].to_pylist()].count(True) / table.num_rows == 0.4
    # The same bytes as without a crash.
    assert {path.name: path.read_bytes() for path in OUT.iterdir()} == whole


def test_rollouts_killed_at_any_moment_are_sampled_once(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    set_params({"rollout": {**SMALL, "shard_prompts": 1}})
    note(monkeypatch, rollouts, "rollout_table", lambda _, prompts, *__: f"sampled {prompts[0].prompt_id}")
    note(monkeypatch, rollouts, "write_shard", lambda _, table, *__: f"written {table['prompt_id'][0]}")
    ran = kill_many_times("rollout@1", stage.main, "1", "0", outs=[OUT, METRICS], kills=20)
    sampled: set[str] = set()
    written: set[str] = set()
    for lines, published in noted(ran):
        for what, prompt in (line.split(" ", 1) for line in lines):
            # A kill between the write and its note leaves a shard that is never sampled again or noted as written.
            assert prompt not in written
            (sampled if what == "sampled" else written).add(prompt)
        assert not published or sampled == set(TRAIN)
        if published:
            sampled.clear()
            written.clear()


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("rollout", {"shard_prompts": 1}),
        ("rollout", {"samples_per_prompt": 4}),
        ("sampling", {"temperature": 1.0}),
        ("sampling", {"max_new_tokens": 7}),
    ],
)
def test_work_of_other_parameters_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler], section: str, change: dict[str, Any]
) -> None:
    old = crash(monkeypatch, stub, after=2)
    params: dict[str, dict[str, Any]] = {"rollout": dict(SMALL), "sampling": {}}
    params[section].update(change)
    set_params(params)
    run(monkeypatch)
    assert not old.exists()
    size = params["rollout"]["shard_prompts"]
    assert [len(call["prompts"]) for call in stub.calls] == [size] * (5 // size) + [1] * (5 % size)
    assert read_table(OUT).num_rows == 5 * params["rollout"]["samples_per_prompt"]
    sampling = read_metadata(OUT)["sampling"]
    assert all(sampling[name] == value for name, value in change.items() if section == "sampling")


def test_work_of_another_policy_is_thrown_away(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    crash(monkeypatch, stub, after=2)
    Path("data/checkpoints/policy/0/README.md").write_text("another\n")
    run(monkeypatch)
    assert len(stub.calls) == 3


def damage_cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 20)


def damage_empty(path: Path) -> None:
    os.truncate(path, 0)


def damage_other_rows(path: Path) -> None:
    table = pa.Table.from_pylist([{**read_table(path.parent).to_pylist()[0], "sample_id": "1-p9-0"}], schema=ROLLOUTS)
    metadata = read_metadata(path.parent)
    write_shard(path, table, ROLLOUTS, metadata)


@pytest.mark.parametrize("damage", [damage_cut, damage_empty, damage_other_rows])
def test_a_broken_shard_is_sampled_again_and_said_so(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler], caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    work = crash(monkeypatch, stub, after=2)
    damage(work / shard_name(1))
    with caplog.at_level(logging.INFO, "rlhf"):
        run(monkeypatch)
    assert [len(call["prompts"]) for call in stub.calls] == [2, 1]
    assert "sampling shard 1 again" in caplog.text and shard_name(1) in caplog.text
    assert "keeping 1 of 3 shards" in caplog.text
    assert read_table(OUT).num_rows == 10


def test_a_half_written_file_is_removed(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    work = crash(monkeypatch, stub, after=1)
    (work / f".{shard_name(1)}.tmp").write_bytes(b"PAR1 half")
    run(monkeypatch)
    assert sorted(path.name for path in OUT.iterdir()) == [shard_name(i) for i in range(3)]


def test_a_crash_before_publishing_needs_no_engine(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    def die(*_: Path) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(stage, "publish", die)
        with pytest.raises(Crash):
            run(monkeypatch)
    run(monkeypatch)
    assert stub.started == 1 and read_table(OUT).num_rows == 10


def test_running_again_after_success_does_nothing(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    run(monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in OUT.iterdir()}
    metrics = METRICS.read_bytes()
    METRICS.unlink()
    run(monkeypatch)
    assert stub.started == 1
    assert {path: path.stat().st_mtime_ns for path in OUT.iterdir()} == before
    assert METRICS.read_bytes() == metrics


def test_running_again_after_the_out_was_changed_samples_again(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    run(monkeypatch)
    damage_cut(OUT / shard_name(1))
    run(monkeypatch)
    assert stub.started == 2 and read_table(OUT).num_rows == 10


# --- replay only ----------------------------------------------------------------------------------------------------


def test_no_prompts_give_one_empty_shard_without_the_engine(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]
) -> None:
    set_params(
        {
            "rollout": {**SMALL, "prompts_per_iteration": 0},
            "score": {"replay": [1]},
            "advantages": {"correction": "truncate"},
        }
    )
    for _ in range(2):  # the second time it is published already
        run(monkeypatch)
        assert stub.started == 0
        assert [path.name for path in OUT.iterdir()] == [shard_name(0)]
        table, metadata = read_table(OUT), read_metadata(OUT)
        assert table.schema.equals(ROLLOUTS) and table.num_rows == 0
        assert (metadata["iteration"], metadata["temperature"], metadata["eos_ids"]) == ("1", 0.7, [2, 4])
        assert json.loads(METRICS.read_text()) == {
            "rollout/responses": 0,
            "dropped/nonfinite_logprob": 0,
            "rollout/tokens": 0,
            "rollout/empty_responses": 0,
        }


# --- refused before the engine starts -----------------------------------------------------------------------------


def refused(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler], error: type[RlhfError], text: str) -> None:
    with pytest.raises(error, match=text):
        run(monkeypatch)
    assert stub.started == 0 and not OUT.exists()


def test_a_prompt_without_room_is_named(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler], tiny_dir: Path
) -> None:
    write_prompts({**{name: [1] for name in TRAIN}, "p3": [1] * 1024}, hash_tokenizer(tiny_dir))
    refused(monkeypatch, stub, DataError, r"prompt_id 'p3' \(1024 tokens\); sampling.max_model_len is 1024")


def test_a_missing_policy_is_named(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    shutil.rmtree("data/checkpoints/policy/0")
    refused(monkeypatch, stub, ModelError, "data/checkpoints/policy/0: no such directory")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_policy_is_named(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler], name: str) -> None:
    Path("data/checkpoints/policy/0", name).unlink()
    refused(monkeypatch, stub, RlhfError, "data/checkpoints/policy/0|data/prompts was made with another tokenizer")


def test_prompts_of_another_tokenizer_are_stale(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    write_prompts({name: [1] for name in TRAIN}, "another")
    refused(
        monkeypatch, stub, StaleInput, "data/prompts was made with another tokenizer than .*policy/0; run `dvc repro"
    )


def test_no_training_prompt_is_an_error(
    monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler], tiny_dir: Path
) -> None:
    write_prompts({"e0": [1], "e1": [1]}, hash_tokenizer(tiny_dir))
    refused(monkeypatch, stub, DataError, "no prompt of split 'train' among 2")


def test_an_unknown_iteration_is_an_error(monkeypatch: pytest.MonkeyPatch, stub: type[StubSampler]) -> None:
    with pytest.raises(ConfigError, match="no iteration '9'"):
        run(monkeypatch, "9", "0")
