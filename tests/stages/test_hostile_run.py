"""Hostile ids, pickles and secrets in a run of the tiny model: nothing leaves the project, runs, or is written down.

Mutations that must fail here: torch.load for a checkpoint's tensors; an id in a file name; the token in a message.
"""

import os
from pathlib import Path

import pyarrow as pa
import pytest

from rlhf_core.artifacts.schema import ROLLOUTS
from rlhf_core.artifacts.shards import read_metadata, read_shard, read_table, shard_paths, write_shard
from rlhf_core.errors import ModelError, RewardError
from stages import advantages, ppo_update, score
from tests.bomb import bomb
from tests.stub_server import serve
from tests.tiny_run import POLICY, set_rewards, stage
from tests.unit.test_hostile_content import STEERS

SECRET = "hf_SECRETsecretSECRETsecret0123456789"
ROLLOUTS_1 = Path("data/rollouts/iteration=1")


def hostile_ids() -> None:
    """Ids that are paths, in what iteration 1 sampled."""
    names = ["../../../../evil", "/tmp/evil", "..", "~/evil", f"a{STEERS}", "$(touch evil)"]
    number, metadata = 0, read_metadata(ROLLOUTS_1)
    for path in shard_paths(ROLLOUTS_1):
        table = read_shard(path)
        ids = names[number : number + table.num_rows]
        for column in ("prompt_id", "response"):
            table = table.set_column(table.column_names.index(column), column, pa.array(ids))
        sample_ids = pa.array([f"1-{name}-0" for name in ids])
        write_shard(path, table.set_column(0, "sample_id", sample_ids), ROLLOUTS, metadata)
        number += table.num_rows


def test_ids_that_are_paths_stay_ids(project, monkeypatch):
    before = {path for path in project.parent.rglob("*") if project not in path.parents}
    hostile_ids()
    set_rewards(rule={"kind": "regex", "pattern": "a", "match": "search"})
    for module in (score, advantages, ppo_update):
        stage(module, monkeypatch, "1", "0")
    assert {path for path in project.parent.rglob("*") if project not in path.parents} == before
    assert not [path for path in project.rglob("*evil*")] and not Path("/tmp/evil").exists()
    assert read_table(Path("data/advantages/iteration=1"))["sample_id"][0].as_py() == "1-../../../../evil-0"


@pytest.mark.parametrize(
    "file, before, reader",
    [
        ("critic/0/value_head.safetensors", (), score),
        ("optimizer/0/moments.safetensors", (score, advantages), ppo_update),
    ],
)
def test_a_pickle_in_place_of_our_own_state_is_refused_and_not_run(project, monkeypatch, file, before, reader):
    set_rewards(rule={"kind": "regex", "pattern": "a", "match": "search"})
    for module in before:
        stage(module, monkeypatch, "1", "0")
    path = POLICY.parent / file
    path.write_bytes(bomb(project / "MARK"))
    path.with_name("lineage.json").unlink()  # whoever swaps a file can forge what is recorded of it
    with pytest.raises(ModelError, match=f"{file}: "):
        stage(reader, monkeypatch, "1", "0")
    assert not (project / "MARK").exists()


@pytest.mark.parametrize("answers", ["scores", "echo", "refuses"])
def test_secrets_are_in_no_file_and_no_message(project, monkeypatch, capfd, caplog, answers):
    """HF_TOKEN, and the token of a service that repeats what it is sent."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("MY_TOKEN", SECRET)

    def service(number, request):
        if answers == "scores":
            return 200, {"scores": [1.0] * len(request["rows"])}
        return (500 if answers == "echo" else 403), {"you sent": f"Bearer {SECRET}", "headers": [SECRET] * 3}

    said = ""
    with serve(service) as stub:
        source = {"kind": "http", "url": stub.url, "batch_size": 2, "timeout_s": 5.0, "retries": 1, "backoff_s": 0.0}
        set_rewards(service={**source, "auth_env": "MY_TOKEN"})
        if answers == "scores":
            for module in (score, advantages, ppo_update):
                stage(module, monkeypatch, "1", "0")
        else:
            with pytest.raises(RewardError, match=r"\*\*\*") as error:
                stage(score, monkeypatch, "1", "0")
            said = str(error.value)
    shown = capfd.readouterr()
    assert SECRET not in said + caplog.text + shown.out + shown.err
    files = [path for path in project.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert os.environ["HF_TOKEN"] == SECRET
