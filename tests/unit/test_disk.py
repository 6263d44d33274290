"""Full disks, limits and forbidden directories: in our words, nothing half-written left, and room checked beforehand.

Mutations that must fail here: the unfinished file left; EFBIG let through; the free bytes of a parent that does not
exist; needed and free exchanged.
"""

import errno
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from rlhf_core.artifacts.schema import ROLLOUTS
from rlhf_core.artifacts.shards import shard_name, write_shard
from rlhf_core.disk import directory_bytes, disk_error, free_bytes, require_space, size_text
from rlhf_core.errors import DiskError
from rlhf_core.models.checkpoint import OptimizerState, new_value_head, save_critic, save_optimizer
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import save_like
from rlhf_core.reward.passes import save_array
from rlhf_core.stage import write_json
from tests.file_graph import environment, rows
from tests.tiny import tiny_model

FULL = r"cannot be written \(\S+ \w+ needed, \S+ \w+ free\): .*(disk is full|limit on file sizes).*same command again"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond this; Python ignores the signal, so the write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_parquet(directory: Path) -> None:
    row = rows("1").to_pylist()[0]
    noise = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    long = {**row, "response_ids": list(range(len(noise))), "sampler_logprobs": noise.tolist()}
    write_shard(directory / shard_name(0), pa.Table.from_pylist([long], schema=ROLLOUTS), ROLLOUTS, {})


def write_optimizer(directory: Path) -> None:
    first, second = ({"policy.x": torch.ones(20_000)} for _ in range(2))
    save_optimizer(OptimizerState({"policy": 1}, 1, first, second), directory)


WRITERS = {
    "parquet": write_parquet,
    "array": lambda directory: save_array(directory / "x.npy", np.ones(20_000, np.float32)),
    "json": lambda directory: write_json(directory / "x.json", ["x" * 100] * 300),
    "optimizer": write_optimizer,
    "critic": lambda directory: save_critic(Critic(new_value_head(20_000)), directory),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_size_limit_is_told_with_needed_and_free_bytes_and_leaves_nothing_visible(
    tmp_path: Path, kind: str
) -> None:
    with file_size_limit(10_000), pytest.raises(DiskError, match=FULL):
        WRITERS[kind](tmp_path / "out")
    if kind in ("parquet", "array", "json"):
        assert list((tmp_path / "out").iterdir()) == []
    WRITERS[kind](tmp_path / "out")  # with room again
    assert directory_bytes(tmp_path / "out") > 10_000


def test_a_model_that_does_not_fit_is_told_with_its_size(tmp_path: Path, tiny_dir: Path) -> None:
    model = tiny_model()
    with file_size_limit(50_000), pytest.raises(DiskError, match=FULL):
        save_like(model, tiny_dir, tmp_path / "policy", card="")
    save_like(model, tiny_dir, tmp_path / "policy", card="")


def test_a_full_file_system_is_told_by_every_writer(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        for kind, writer in WRITERS.items():
            (disk / "ballast").write_bytes(b"x" * (free_bytes(disk) - 8192))
            with pytest.raises(DiskError, match=FULL):
                writer(disk / kind)
            (disk / "ballast").unlink()
            for path in (disk / kind).glob("*"):
                path.unlink()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_kernel_says_is_told_with_the_file(tmp_path: Path, number: int) -> None:
    found = disk_error(OSError(number, "x", str(tmp_path / "file")))
    assert isinstance(found, DiskError) and str(found).startswith(f"{tmp_path}/file: cannot be written")


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "x"), OSError("x"), ValueError("os error 28"), KeyError("a")])
def test_other_errors_are_not_taken_for_the_disk(error: Exception) -> None:
    assert disk_error(error) is None


def test_a_librarys_own_words_are_understood() -> None:
    for text in ("I/O error: No space left on device (os error 28)", "Error: File too large (os error 27)"):
        assert isinstance(disk_error(RuntimeError(text)), DiskError)
    assert isinstance(disk_error(OSError("20000 requested and 1248 written")), DiskError)  # numpy's tofile


def test_room_is_checked_where_the_result_will_go(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    require_space(tmp_path / "not/there/yet", 1, "nothing")
    with pytest.raises(DiskError, match=r"not/there: 7 checkpoints takes about .*, .* are free; .*`dvc gc -w`"):
        require_space(tmp_path / "not/there", free * 2 + 2**30, "7 checkpoints")


def test_sizes_are_for_people() -> None:
    assert [size_text(size) for size in (0, 9000, 20_480, 1.5 * 2**30, 2**41)] == [
        "0 bytes", "9000 bytes", "20.0 KiB", "1.5 GiB", "2.0 TiB",
    ]  # fmt: skip


def test_a_stage_in_a_read_only_directory_says_so_without_a_traceback(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")  # a mode does not stop root
    try:
        command = [sys.executable, "-c", "from rlhf_core.stage import run_stage; run_stage('ingest', lambda: None)"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "DiskError: .work: cannot be written: the file system is mounted read-only" in done.stderr
