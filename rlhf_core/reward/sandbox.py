"""Run a program that nobody has read against tests, cut off from the machine. What it guarantees: docs/sandbox.md.

This is the outer half: it starts sandbox_child.py, feeds it, reads no more than the limit, stops it, and judges.
"""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_core.errors import SandboxError
from rlhf_core.reward import sandbox_child

# How a test can end. The kind of a program is that of its first test that is not ok.
KINDS = ("ok", "wrong", "error", "timeout", "memory", "output")

# The start of the sandbox itself is not the program's time; a machine that is this slow has another problem.
_START_SECONDS = 60.0
_PROBE_SECONDS = 10.0
# For the last output to arrive. All writers are dead by then, unless the platform lets some escape.
_DRAIN_SECONDS = 1.0
_PYTHON_OPTIONS = ["-s", "-S", "-P", "-B", "-X", "utf8"]
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # sets and dictionaries in the same order each time

# Runs assert statements after the program, in its module. Ending early is no pass: only the last line says that the
# tests were reached and passed, and it needs the word on standard input.
_DRIVER = """
import json, os, sys, types
given = json.load(sys.stdin)
program = sys.modules["program"] = types.ModuleType("program")
with open("program.py", encoding="utf-8") as file:
    exec(compile(file.read(), "program.py", "exec"), program.__dict__)
exec(compile(given["asserts"], "asserts", "exec"), program.__dict__)
sys.stdout.flush()
os.write(1, given["word"].encode())
"""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use."""

    seconds: float  # of wall-clock time
    memory_mb: int  # MiB of address space for each process
    disk_mb: int  # MiB of files in its temporary directory, which are kept in memory
    processes: int  # at once, threads included
    output_kb: int  # KiB of standard output, and of standard error


@dataclass(frozen=True)
class InputOutput:
    """A test: with this standard input, the program prints this.

    Compared line by line without trailing white space, and without trailing empty lines.
    """

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Asserts:
    """A test: these statements run after the program, with its names, without an exception.

    The program is not `__main__` then: what it guards by `if __name__ == "__main__"` does not run.
    """

    code: str


@dataclass(frozen=True)
class Result:
    """How a program did."""

    passed: int
    total: int
    kind: str  # one of KINDS
    output: str  # what the first test that is not ok printed, errors after it; cut at the limit


@dataclass(frozen=True)
class _Run:
    stdout: bytes
    stderr: bytes
    kind: str  # "" when the program ended on its own
    exit: int | None  # None when a signal ended it


def run_program(
    source: str, tests: Sequence[InputOutput | Asserts], limits: Limits, *, allow_unisolated: bool
) -> Result:
    """Run a Python program once for each test, in a fresh sandbox each time, and count the tests that pass.

    Args:
        source: The program. It finds Python's standard library and nothing else.
        tests: At least one.
        limits: Of each run.
        allow_unisolated: Run even where the platform lacks layers (missing_layers), with what is left of them.

    Raises:
        SandboxError: If layers are missing and that is not allowed, or the sandbox itself could not be set up. Never
            because of what the program does.
    """
    if not tests:
        raise SandboxError("a program needs at least one test")
    require_isolation(limits, allow_unisolated=allow_unisolated)
    runs = [_run_test(source, test, limits, allow_unisolated) for test in tests]
    failed = [(kind, run) for kind, run in runs if kind != "ok"]
    kind, shown = (failed or runs)[0]
    output = (shown.stdout + shown.stderr).decode(errors="replace")
    return Result(passed=len(runs) - len(failed), total=len(runs), kind=kind, output=output)


def missing_layers() -> tuple[str, ...]:
    """Return the layers of isolation that this platform lacks, by an actual run; () where all are there.

    Raises:
        SandboxError: If not even an empty program runs.
    """
    return _missing_layers(Limits(seconds=_PROBE_SECONDS, memory_mb=256, disk_mb=1, processes=1, output_kb=16))


def require_isolation(limits: Limits, *, allow_unisolated: bool) -> None:
    """Raise SandboxError when layers are missing and that is not allowed, or no program runs within these limits."""
    missing = _missing_layers(replace(limits, seconds=max(limits.seconds, _PROBE_SECONDS)))
    if missing and not allow_unisolated:
        raise SandboxError(
            f"programs are not run here: the platform lacks isolation of {', '.join(missing)} (docs/sandbox.md says"
            " what each stops, and what provides it). Set allow_unisolated: true only for programs you trust"
        )


@cache
def _missing_layers(limits: Limits) -> tuple[str, ...]:
    missing, run = _run({"program.py": ""}, "", limits, True)
    if run.kind or run.exit != 0:
        ended = run.kind or f"exit code {run.exit}"
        raise SandboxError(
            f"an empty program does not run within {limits}: {ended} {run.stderr.decode(errors='replace')[-500:]}"
        )
    return tuple(missing)


def _run_test(source: str, test: InputOutput | Asserts, limits: Limits, allow_unisolated: bool) -> tuple[str, _Run]:
    """Run one test; return its kind, and the run without the driver's word."""
    if isinstance(test, InputOutput):
        _, run = _run({"program.py": source}, test.stdin, limits, allow_unisolated)
        return _kind(run, _lines(run.stdout) == _lines(test.stdout.encode())), run
    word = secrets.token_hex(16)
    given = json.dumps({"asserts": test.code, "word": word})
    _, run = _run({"program.py": source, "driver.py": _DRIVER}, given, limits, allow_unisolated)
    reached = run.stdout.endswith(word.encode())
    run = _Run(run.stdout.removesuffix(word.encode()), run.stderr, run.kind, run.exit)
    if run.kind == "" and run.exit == 1 and _raised(run, "AssertionError"):
        return "wrong", run
    return ("error" if run.exit == 0 and not run.kind and not reached else _kind(run, reached)), run


def _kind(run: _Run, right: bool) -> str:
    if run.kind:
        return run.kind
    if run.exit == 0:
        return "ok" if right else "wrong"
    return "memory" if _raised(run, "MemoryError") else "error"


def _raised(run: _Run, name: str) -> bool:
    """Whether the last line of the error output names this exception."""
    lines = run.stderr.decode(errors="replace").rstrip().splitlines()
    return bool(lines) and lines[-1].split(":")[0] == name


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run(files: dict[str, str], stdin: str, limits: Limits, allow_unisolated: bool) -> tuple[list[str], _Run]:
    """Run driver.py, or else program.py, of some files in a fresh sandbox; return missing layers, and how it went."""
    python = os.path.realpath(sys.executable)
    script = "driver.py" if "driver.py" in files else "program.py"
    with tempfile.TemporaryDirectory(prefix="rlhf-sandbox-") as name:
        directory = Path(name)
        (directory / "root").mkdir()
        (directory / "stdin").write_bytes(stdin.encode(errors="surrogatepass"))
        request = {
            "argv": [python, *_PYTHON_OPTIONS, script],
            "environment": _ENVIRONMENT,
            "files": files,
            "directory": name,
            "visible": _visible(python),
            "parent": os.getpid(),
            "allow_unisolated": allow_unisolated,
            **vars(limits),
        }
        (directory / "request.json").write_text(json.dumps(request))
        read_end, write_end = os.pipe()
        with (directory / "stdin").open("rb") as stdin_file:
            launcher = subprocess.Popen(
                [python, "-I", "-S", "-B", sandbox_child.__file__, str(directory / "request.json"), str(write_end)],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=[write_end],
                start_new_session=True,
            )
        os.close(write_end)
        try:
            return _watch(launcher, read_end, limits)
        finally:
            _kill(launcher)
            launcher.wait()
            os.close(read_end)
            for pipe in (launcher.stdout, launcher.stderr):
                assert pipe is not None
                pipe.close()


def _visible(python: str) -> list[str]:
    """Paths that a program can read: Python itself and the libraries it is linked to. Nothing of the caller's."""
    prefix = Path(sys.base_prefix)
    wanted = [
        python,
        str(prefix / "lib"),
        str(prefix / "lib64"),
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
    ]
    paths = list(dict.fromkeys(path for path in wanted if Path(path).exists()))
    inside = [path for path in paths if any(path.startswith(f"{other}/") for other in paths)]
    return [path for path in paths if path not in inside]


def _watch(launcher: "subprocess.Popen[bytes]", status_fd: int, limits: Limits) -> tuple[list[str], _Run]:
    """Read what a run prints and reports until it ends, or until it has taken too long or printed too much."""
    assert launcher.stdout is not None and launcher.stderr is not None
    stdout, stderr, status = launcher.stdout.fileno(), launcher.stderr.fileno(), status_fd
    read: dict[int, bytearray] = {stdout: bytearray(), stderr: bytearray(), status: bytearray()}
    poll = select.poll()
    for fd in read:
        poll.register(fd, select.POLLIN)
    still_open = len(read)
    cap = limits.output_kb * 1024
    deadline = time.monotonic() + _START_SECONDS
    started, ended, killed = False, False, ""
    while still_open:
        for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            chunk = os.read(fd, 65536)
            read[fd] += chunk if fd == status else chunk[: cap + 1 - len(read[fd])]
            if not chunk:
                poll.unregister(fd)
                still_open -= 1
        messages = _messages(read[status])
        late = time.monotonic() >= deadline
        if ended and late:
            break
        if not started and messages.get("started"):
            started, deadline = True, time.monotonic() + limits.seconds
        elif not ended:
            too_much = max(len(read[stdout]), len(read[stderr])) > cap
            killed = "output" if too_much else "timeout" if late else ""
            if killed or "exit" in messages or "signal" in messages:
                ended, deadline = True, time.monotonic() + _DRAIN_SECONDS
                _kill(launcher)  # and with it everything that the program left running
    return _verdict(_messages(read[status]), bytes(read[stdout][:cap]), bytes(read[stderr][:cap]), killed)


def _verdict(messages: dict[str, Any], stdout: bytes, stderr: bytes, killed: str) -> tuple[list[str], _Run]:
    """Tell how a run went from what the sandbox reported."""
    if "setup" in messages or "missing" not in messages or not (messages["started"] or messages["missing"]):
        reason = messages.get("setup", stderr.decode(errors="replace")[-500:] or "it did not start")
        raise SandboxError(f"the sandbox could not be set up: {reason}")
    if not messages["started"]:
        raise SandboxError(f"the platform lacks isolation of {', '.join(messages['missing'])}")
    if not killed and "exit" not in messages and "signal" not in messages:
        raise SandboxError("the sandbox was killed from outside; is there a limit on this machine's processes?")
    # SIGKILL: the machine ran out of memory (or the program killed itself, which cannot be told apart).
    by_kernel: dict[int, str] = {signal.SIGXCPU: "timeout", signal.SIGKILL: "memory"}
    kind = killed or by_kernel.get(messages.get("signal", 0), "")
    return messages["missing"], _Run(stdout, stderr, kind, messages.get("exit"))


def _messages(text: bytearray) -> dict[str, Any]:
    """The complete lines of the report so far, as one mapping."""
    found: dict[str, Any] = {}
    for line in bytes(text).split(b"\n")[:-1]:
        found.update(json.loads(line))
    return found


def _kill(launcher: "subprocess.Popen[bytes]") -> None:
    """Kill the launcher's group; process 1 is in it, and with process 1 goes everything inside."""
    if launcher.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
