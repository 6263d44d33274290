"""What a checkpoint directory says of itself, and damage to it of every kind, as those who read it see it.

Mutations that must fail here: lineage.json counted among its own files; sizes not compared; the header's end taken for
the file's; a flipped header passed on to the library.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rlhf_core.artifacts.lineage import check_directory, check_safetensors, read_lineage, write_lineage
from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.errors import ArtifactError, ModelError, RlhfError
from rlhf_core.models.checkpoint import OptimizerState, load_critic, load_optimizer, new_value_head, save_critic
from rlhf_core.models.checkpoint import save_optimizer as write_optimizer
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm, save_like
from rlhf_core.models.tokenizer import load_tokenizer
from tests.tiny import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with weights, one file in a folder, and its lineage."""
    directory = tmp_path / "policy"
    (directory / "sub").mkdir(parents=True)
    save_file({"w": np.arange(64, dtype=np.float32)}, directory / "model.safetensors")
    (directory / "sub/config.json").write_text("{}")
    write_lineage(directory, stage="ppo_update", iteration="2", inputs={"data/advantages/iteration=2": "ab" * 32})
    return directory


def flip(path: Path, offset: int) -> None:
    """Flip one bit in place, as a bad disk would."""
    with path.open("r+b") as handle:
        handle.seek(offset if offset >= 0 else path.stat().st_size + offset)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 0x04]))


def test_lineage_names_stage_inputs_and_every_other_file(checkpoint: Path) -> None:
    found = json.loads((checkpoint / "lineage.json").read_text())
    assert (found["stage"], found["iteration"]) == ("ppo_update", "2")
    assert found["inputs"] == {"data/advantages/iteration=2": "ab" * 32}
    assert found["files"] == {
        name: {"bytes": (checkpoint / name).stat().st_size, "sha256": hash_path(checkpoint / name)}
        for name in ("model.safetensors", "sub/config.json")
    }


def test_writing_it_again_gives_the_same_bytes(checkpoint: Path) -> None:
    before = hash_path(checkpoint)
    write_lineage(checkpoint, stage="ppo_update", iteration="2", inputs={"data/advantages/iteration=2": "ab" * 32})
    assert hash_path(checkpoint) == before


def test_a_directory_from_elsewhere_has_none_and_is_checked_by_its_headers_alone(checkpoint: Path) -> None:
    (checkpoint / "lineage.json").unlink()
    (checkpoint / "sub/config.json").write_text('{"other": 1}')
    assert read_lineage(checkpoint) is None
    check_directory(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 1, "inputs": {}}', '{"files": {"a": {}}, "inputs": {}}'])
def test_a_damaged_lineage_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "lineage.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"policy/lineage.json: damaged"):
        check_directory(checkpoint)


def test_a_file_cut_short_is_named_with_both_sizes(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 20)
    with pytest.raises(ModelError, match=rf"model.safetensors: {size - 20} bytes, {size} were written"):
        check_directory(checkpoint)


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "sub/config.json").unlink()
    with pytest.raises(ModelError, match=r"sub/config.json: missing, though lineage.json beside it lists it"):
        check_directory(checkpoint)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 50, 200])
def test_a_safetensors_file_of_any_shorter_size_is_refused(checkpoint: Path, size: int) -> None:
    path = checkpoint / "model.safetensors"
    os.truncate(path, size)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        check_safetensors(path)


def test_a_flipped_bit_in_a_safetensors_header_ends_in_our_words_or_changes_no_size(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    refused = 0
    for offset in range(8 + int.from_bytes(whole[:8], "little")):
        path.write_bytes(whole)
        flip(path, offset)
        try:
            check_safetensors(path)  # a tensor's name may be another; then its loader misses it
        except ModelError:
            refused += 1
    assert refused > 30


# --- as those who load a checkpoint see it ------------------------------------------------------------------------


def readers(directory: Path) -> None:
    """Load everything there is, as the stages do."""
    policy = load_causal_lm(directory / "policy", device=CPU, precision="float32")
    load_tokenizer(directory / "policy")
    load_critic(directory / "critic", policy=policy, device=CPU, precision="float32")
    load_optimizer(directory / "optimizer")


@pytest.fixture
def checkpoints(tmp_path: Path, tiny_dir: Path) -> Path:
    """Policy, critic and optimiser state as ppo_update leaves them."""
    save_like(tiny_model(3), tiny_dir, tmp_path / "policy", card="# Policy\n")
    save_critic(Critic(new_value_head(64)), tmp_path / "critic")
    first, second = ({"policy.x": torch.ones(8)} for _ in range(2))
    write_optimizer(OptimizerState({"policy": 1}, 4, first, second), tmp_path / "optimizer")
    for name in ("policy", "critic", "optimizer"):
        write_lineage(tmp_path / name, stage="ppo_update", iteration="1", inputs={})
    readers(tmp_path)
    return tmp_path


FILES = (
    "policy/model.safetensors",
    "policy/config.json",
    "policy/tokenizer.json",
    "policy/tokenizer_config.json",
    "policy/lineage.json",
    "critic/value_head.safetensors",
    "critic/critic.json",
    "optimizer/moments.safetensors",
    "optimizer/optimizer.json",
)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_in_half_is_refused_by_name(checkpoints: Path, name: str) -> None:
    path = checkpoints / name
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(RlhfError, match=name.split("/")[0]):
        readers(checkpoints)


# Of a tokenizer from elsewhere only that it is JSON is checked; its library has no error of its own for the rest.
UNKNOWN = [(name, False) for name in FILES if name not in ("policy/lineage.json", "policy/tokenizer.json")]


@pytest.mark.parametrize(("name", "known"), [*((name, True) for name in FILES if "lineage" not in name), *UNKNOWN])
def test_a_flipped_bit_ends_in_our_words_or_goes_unseen_until_verify(checkpoints: Path, name: str, known: bool) -> None:
    if not known:  # as in a directory from elsewhere
        (checkpoints / name).with_name("lineage.json").unlink()
    path = checkpoints / name
    whole = path.read_bytes()
    for offset in (0, 9, len(whole) // 2):
        path.write_bytes(whole)
        flip(path, offset)
        said = []
        try:
            readers(checkpoints)
        except RlhfError as error:
            said.append(str(error))
        assert all(name.split("/")[0] in text for text in said)
        assert said or not known or name.endswith(".safetensors")  # the small files are hashed
