"""Who trains on which rows, and how a stage becomes several processes. What they compute: tests/stages.

Mutations that must fail here: shares by position instead of length; a row in two shares; a launcher inside a launcher;
threads that were chosen by hand overruled.
"""

import os
import sys
from typing import Any

import pytest
import torch

from rlhf_core.errors import ConfigError, NumericError
from rlhf_core.stage import LAUNCHER
from rlhf_core.training.distributed import ALONE, Processes, join, launch


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS", LAUNCHER):
        monkeypatch.setenv(name, "")  # so that whatever is set here is undone
        monkeypatch.delenv(name)


def test_rows_are_dealt_out_by_length() -> None:
    # Longest first: rows 0 (9 tokens), 2 (7), 4 (5), 3 (2), 1 (1); in turn to the two processes.
    lengths = [9, 1, 7, 2, 5]
    assert [Processes(rank, 2).share(lengths) for rank in (0, 1)] == [[0, 1, 4], [2, 3]]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_row_has_one_process_and_some_processes_may_have_none(size: int) -> None:
    shares = [Processes(rank, size).share([4, 4, 9, 1, 2]) for rank in range(size)]
    assert sorted(row for share in shares for row in share) == [0, 1, 2, 3, 4]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_there_is_nothing_to_exchange() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    ALONE.add_gradients([weight])
    assert weight.grad is None
    assert ALONE.gathered("x") == ["x"]
    assert ALONE.collected(3, ALONE.share([1, 1, 1]), ["a", "b", "c"]) == ["a", "b", "c"]
    assert join(torch.device("cpu")) == (ALONE, torch.device("cpu"))
    with pytest.raises(NumericError, match="this one"), ALONE.together():
        raise NumericError("this one")


def started(monkeypatch: pytest.MonkeyPatch, processes: int) -> list[str]:
    """The command line that launch would become."""
    found: list[str] = []

    def execv(path: str, command: list[str]) -> Any:
        found.extend([path, *command])

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["stages/x.py", "1", "0"])
    launch("stages.x", processes)
    return found


def test_a_stage_becomes_a_launcher_with_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)))
    command = started(monkeypatch, 3)
    assert command[:2] == [sys.executable, sys.executable]
    assert command[-7:] == ["--standalone", "--nproc-per-node", "3", "-m", "stages.x", "1", "0"]
    assert os.environ["OMP_NUM_THREADS"] == "2"  # 7 cores for 3 processes
    assert os.environ[LAUNCHER] == str(os.getpid())


def test_threads_that_were_chosen_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert started(monkeypatch, 3)
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_one_process_and_a_process_of_a_launcher_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, 1) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert started(monkeypatch, 2) == []


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"process 2 of this machine found 1 GPUs.*lower compute\.processes"):
        join(torch.device("cuda"))
