"""Optimiser state on disk: numbers and tensors, never objects that run code when they are read."""

from pathlib import Path

import pytest
import torch

from rlhf_core.errors import ModelError
from rlhf_core.models.checkpoint import OptimizerState, load_optimizer, save_optimizer
from tests.bomb import bomb


def test_a_pickle_in_the_place_of_any_file_of_the_state_is_refused_and_not_run(tmp_path: Path) -> None:
    state = OptimizerState(steps={"policy": 3}, episode=7, first_moments={"w": torch.ones(2)}, second_moments={})
    marker = tmp_path / "MARK"
    save_optimizer(state, tmp_path / "state")
    files = sorted(path for path in (tmp_path / "state").iterdir() if path.suffix in (".json", ".safetensors"))
    assert len(files) == 2 and load_optimizer(tmp_path / "state").episode == 7
    for path in files:
        content = path.read_bytes()
        path.write_bytes(bomb(marker))
        with pytest.raises(ModelError, match=path.name):
            load_optimizer(tmp_path / "state")
        path.write_bytes(content)
    assert not marker.exists()
