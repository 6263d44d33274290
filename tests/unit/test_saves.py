"""Saves of a training's state: whole or absent, the newest used, damage noticed, a full disk survived.

Mutations that must fail here: the newest save not preferred; a damaged one used; the one before it kept; a save written
by every process; the rename before the write.
"""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.training import saves as module
from rlhf_core.training.distributed import ALONE, Processes
from rlhf_core.training.saves import Saves
from tests.bomb import bomb


def saves(directory: Path, processes: Processes = ALONE) -> Saves:
    return Saves(directory, 2, processes)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weight/a": torch.full((3,), value), "step/a": torch.tensor(value)}


def test_a_state_is_due_after_every_so_many_steps():
    assert [done for done in range(7) if saves(Path()).due(done)] == [0, 2, 4, 6]
    assert not any(Saves(Path(), 0, ALONE).due(done) for done in range(7))


def test_what_is_kept_comes_back_bit_by_bit_and_the_one_before_is_gone(tmp_path):
    kept = saves(tmp_path / "saves")
    assert kept.newest() is None
    for done, value in ((2, 0.1), (4, 0.3)):
        kept.write(done, tensors(value), {"done": done, "log": [["z", 0.1 + 0.2], ["a", 1e-300]]})
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["00000004"]
    found, facts = kept.newest()
    assert facts == {"done": 4, "log": [["z", 0.1 + 0.2], ["a", 1e-300]]}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(0.3).items())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def change(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"done": 4', b'"done": 5') if path.suffix == ".json" else content[:-1] + b"x")


@pytest.mark.parametrize("damage", [cut, change, os.remove])
@pytest.mark.parametrize("name", ["tensors.safetensors", "facts.json"])
def test_a_damaged_save_is_named_and_the_one_before_it_is_used(tmp_path, caplog, damage, name):
    kept = saves(tmp_path / "saves")
    saves(tmp_path).write(2, tensors(0.1), {"done": 2})
    kept.write(4, tensors(0.3), {"done": 4})
    (tmp_path / "00000002").rename(tmp_path / "saves/00000002")  # as where the kill came before its removal
    tmp_path = tmp_path / "saves"
    damage(tmp_path / "00000004" / name)
    found, facts = kept.newest()
    assert facts == {"done": 2} and found["step/a"] == pytest.approx(0.1)
    assert "00000004 cannot be read and is not used" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def test_a_pickle_in_the_place_of_a_save_is_not_run(tmp_path):
    kept = saves(tmp_path / "saves")
    kept.write(2, tensors(0.1), {"done": 2})
    state, facts = (tmp_path / "saves/00000002" / name for name in ("tensors.safetensors", "facts.json"))
    before = hash_path(state)
    state.write_bytes(bomb(tmp_path / "MARK"))
    facts.write_text(facts.read_text().replace(before, hash_path(state)))  # forged, so that nothing else refuses it
    assert kept.newest() is None
    assert not (tmp_path / "MARK").exists()


def test_a_half_written_save_is_removed(tmp_path):
    kept = saves(tmp_path)
    (tmp_path / ".00000002.tmp").mkdir()
    (tmp_path / ".00000002.tmp" / "tensors.safetensors").write_bytes(b"half")
    assert kept.newest() is None
    assert list(tmp_path.iterdir()) == []


def test_where_the_disk_is_full_training_goes_on_with_the_save_before(tmp_path, caplog, monkeypatch):
    kept = saves(tmp_path)
    kept.write(2, tensors(0.1), {"done": 2})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with caplog.at_level(logging.WARNING, "rlhf"):
        kept.write(4, tensors(0.3), {"done": 4})
    assert "step 4: the state of training could not be kept" in caplog.text and "No space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def test_only_the_main_process_writes_and_all_must_find_the_same(tmp_path, monkeypatch):
    saves(tmp_path, Processes(rank=1, size=2)).write(2, tensors(0.1), {"done": 2})
    assert list(tmp_path.iterdir()) == []
    two = Processes(rank=0, size=2)
    saves(tmp_path).write(2, tensors(0.1), {"done": 2})
    monkeypatch.setattr(Processes, "gathered", lambda self, value: [value, value])
    assert saves(tmp_path, two).newest()[1] == {"done": 2}
    monkeypatch.setattr(Processes, "gathered", lambda self, value: [value, None])
    assert saves(tmp_path, two).newest() is None
