"""Kill a stage at many moments: forks of this process, which has torch in memory, run its main and get a SIGKILL.

The fork is a process as real as one that dvc starts (run_stage: its lock, its death with the parent), without the
seconds that importing torch takes.
"""

import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from rlhf_core.stage import run_stage, work_root

Main = Callable[[], None]
DONE, KILLED = 0, -signal.SIGKILL


def start(name: str, main: Main, *arguments: str, environment: dict[str, str] | None = None) -> int:
    """Fork a process that runs a stage, and return its number. What it says goes to the file `said`."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stdout = sys.stderr = open("said", "a", buffering=1)  # noqa: SIM115
        tqdm.set_lock(threading.RLock())  # its own is shared by all forks, and stays locked where one is killed with it
        os.environ.update(environment or {})
        sys.argv = ["stage", *arguments]
        run_stage(name, main)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def together(name: str, main: Main, *arguments: str, processes: int) -> list[int]:
    """Fork the processes of a stage with compute.processes, as a launcher would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(name, main, *arguments, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]


def wait(*children: int) -> list[int]:
    """Wait for processes and return their exit codes; of one that a signal killed, the signal's number, negative."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def kill(*children: int) -> list[int]:
    """Kill processes and return how they ended; one may have been done before."""
    for child in children:
        os.kill(child, signal.SIGKILL)
    codes = wait(*children)
    assert set(codes) <= {DONE, KILLED}, said()
    return codes


def kill_after(seconds: float, child: int) -> tuple[bool, float]:
    """Kill a process after some time; whether it was done before, and the seconds that it ran."""
    began = time.monotonic()
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() - began > seconds:
            break
        time.sleep(0.002)
    return kill(child) == [DONE], time.monotonic() - began


def kill_when(condition: Callable[[], bool], *children: int) -> None:
    """Kill processes as soon as something is so."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(0.001)
    assert kill(*children) == [KILLED] * len(children)


def finish(name: str, main: Main, *arguments: str) -> int:
    """Run a stage to its end and return its process's number."""
    child = start(name, main, *arguments)
    assert wait(child) == [DONE], said()
    return child


def kill_many_times(name: str, main: Main, *arguments: str, outs: list[Path], kills: int) -> list[tuple[int, bool]]:
    """Kill a stage at random moments until `kills` have hit it, and compare what it writes whenever it gets to its end.

    Between two kills it goes on from what is there, as `dvc repro` would let it: the outs are removed first.

    Returns:
        Each process in the order in which they ran, and whether it published everything. One that did may be killed
        while it removes its partial work, or before dvc takes note, so the next one may start anew.
    """
    began = time.monotonic()
    ran = [(finish(name, main, *arguments), True)]
    seconds = time.monotonic() - began
    expected = contents(*outs)
    assert expected and not list(work_root(name).glob("*/"))
    moments = random.Random(name)
    hits = 0
    done = False
    while hits < kills or not done:
        clear(outs)
        child = start(name, main, *arguments)
        done, took = kill_after(moments.uniform(0, seconds) if hits < kills else 600, child)
        hits += not done
        seconds = took if done else seconds  # of a run from where the one before was killed: the end needs kills, too
        found = contents(*outs)
        ran.append((child, found.keys() == expected.keys()))
        if done or ran[-1][1]:
            assert found == expected, different(found, expected)
        assert not done or not list(work_root(name).glob("*/"))
    return ran


def contents(*paths: Path) -> dict[str, bytes]:
    """All files at or below these paths, hidden ones too."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return {file.as_posix(): file.read_bytes() for file in files}


def different(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Names of the files that are not the same in both."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def clear(outs: list[Path]) -> None:
    """Remove what dvc removes before it runs a stage."""
    for path in outs:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def said() -> str:
    """What the stages of this directory have said."""
    return Path("said").read_text() if Path("said").exists() else ""


def note(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, describe: Callable[..., object]) -> None:
    """Have every call of a function write a line to the file `noted` when it has returned."""
    original = getattr(owner, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        with Path("noted").open("a") as handle:
            handle.write(f"{os.getpid()} {describe(*arguments, **options)}\n")
        return found

    monkeypatch.setattr(owner, name, noting)


def noted(ran: list[tuple[int, bool]]) -> Iterator[tuple[list[str], bool]]:
    """What each process noted, and whether it published everything."""
    lines = [line.split(" ", 1) for line in Path("noted").read_text().splitlines()]
    for process, done in ran:
        yield [text for number, text in lines if number == str(process)], done
