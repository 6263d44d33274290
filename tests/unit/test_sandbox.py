"""The sandbox: how runs end, and programs that try to break out.

Mutations that must fail here: no filter of system calls; no own processes; a root that can be written; leave one limit
away; keep root's rights; no end at the deadline or at the cap; let the stage die alone; take an early exit for a pass.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from rlhf_core.errors import SandboxError
from rlhf_core.reward import sandbox
from rlhf_core.reward.sandbox import Asserts, InputOutput, Limits, missing_layers, run_program

LIMITS = Limits(seconds=10.0, memory_mb=256, disk_mb=4, processes=4, output_kb=64)
SHORT = Limits(seconds=1.0, memory_mb=256, disk_mb=4, processes=4, output_kb=64)
ROOT = Path(__file__).parents[2]
MARK = f"box{os.getpid()}"  # what programs call themselves, so that this machine's process list shows them
CALL_ITSELF = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{MARK}', 0, 0, 0)\n"


@pytest.fixture
def isolated() -> None:
    """Only where the platform has all layers: attacks are not run without."""
    if missing_layers():
        pytest.skip(f"this platform lacks isolation of {', '.join(missing_layers())}")


def run(source: str, *, stdin: str = "", stdout: str = "", limits: Limits = LIMITS) -> sandbox.Result:
    return run_program(textwrap.dedent(source), [InputOutput(stdin, stdout)], limits, allow_unisolated=False)


def marked_processes() -> list[str]:
    """Processes of this machine that bear the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            name = path.read_text().strip()
        except OSError:
            continue  # it has ended
        if name == MARK:
            found.append(path.parent.name)
    return found


def assert_nothing_marked_runs() -> None:
    until = time.monotonic() + 5
    while marked_processes() and time.monotonic() < until:
        time.sleep(0.02)
    assert marked_processes() == []


# How runs end.

ENDINGS = {
    "ok": "print(sum(map(int, input().split())))",
    "wrong": "print(4)",
    "error": "1 / 0",
    "memory": "x = bytearray(10**9)",
    "output": "while True: print('x' * 1000)",
}


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("kind", ENDINGS)
def test_a_run_ends_as_its_kind_says(kind: str) -> None:
    result = run(ENDINGS[kind], stdin="1 2\n", stdout="3\n")
    assert (result.kind, result.passed, result.total) == (kind, int(kind == "ok"), 1)


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import time\nwhile True: print(1, flush=True); time.sleep(0.01)",
    ],
)
def test_time_is_over_for_a_program_that_computes_or_sleeps_or_prints_now_and_then(source: str) -> None:
    start = time.monotonic()
    assert run(source, limits=SHORT).kind == "timeout"
    assert time.monotonic() - start < 10


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "code", ["print(3); import sys; sys.exit(3)", "print(3); import os; os.abort()", "]", "\0", "\ud800"]
)
def test_other_ends_are_errors(code: str) -> None:
    assert run(code, stdout="3").kind == "error"


@pytest.mark.usefixtures("isolated")
def test_white_space_at_the_ends_of_lines_does_not_count_and_other_does() -> None:
    assert run("print('1 2  \\n3\\n\\n')", stdout="1 2\n3").kind == "ok"
    assert run("print('1  2\\n3')", stdout="1 2\n3").kind == "wrong"
    assert run("print('1 2\\n\\n3')", stdout="1 2\n3").kind == "wrong"


@pytest.mark.usefixtures("isolated")
def test_tests_are_counted_one_by_one_and_the_first_that_fails_gives_the_kind() -> None:
    tests = [InputOutput("2", "4"), InputOutput("0", "0"), InputOutput("x", "0"), Asserts("assert double(3) == 6")]
    source = "def double(x): return 2 * x\nif __name__ == '__main__': print(double(int(input())) or 'zero')"
    result = run_program(source, tests, LIMITS, allow_unisolated=False)
    assert (result.passed, result.total, result.kind) == (2, 4, "wrong")
    assert result.output == "zero\n"


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    ("source", "asserts", "kind"),
    [
        ("f = abs", "assert f(-1) == 1", "ok"),
        ("f = abs", "assert f(-1) == -1", "wrong"),
        (
            "f = abs",
            "assert f(-1) == 1\nassert f(2) == 3, 'not\\n three'",
            "error",
        ),  # its last line is no AssertionError
        ("f = abs", "assert g(-1) == 1", "error"),
        ("import os; os._exit(0)", "assert False", "error"),
        ("raise SystemExit(0)", "assert False", "error"),
        ("def f(x): raise SystemExit(0)", "assert f(1) == 2", "error"),
        ("def f(x):\n  while True: pass", "assert f(1) == 2", "timeout"),
        ("print('hello')\nf = abs", "assert f(-1) == 1", "ok"),
        (
            "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n  x: int",
            "assert C(1).x == 1",
            "ok",
        ),
    ],
)
def test_asserts_pass_only_when_their_end_is_reached(source: str, asserts: str, kind: str) -> None:
    limits = SHORT if kind == "timeout" else LIMITS
    result = run_program(source, [Asserts(asserts)], limits, allow_unisolated=False)
    assert (result.kind, result.passed) == (kind, int(kind == "ok"))
    if source.startswith("print"):
        assert result.output == "hello\n"


@pytest.mark.usefixtures("isolated")
def test_a_program_gives_the_same_output_each_time() -> None:
    source = "print(list({'a', 'b', 'c', 'd', 'e'}), end='')\nimport sys; sys.exit(1)"
    assert len({run(source).output for _ in range(4)}) == 1


@pytest.mark.usefixtures("isolated")
def test_the_caller_s_umask_does_not_matter() -> None:
    before = os.umask(0o077)
    try:
        assert run("open('x', 'w').write('1'); print(open('x').read())", stdout="1").kind == "ok"
    finally:
        os.umask(before)


def test_a_program_needs_a_test() -> None:
    with pytest.raises(SandboxError, match="at least one test"):
        run_program("print(1)", [], LIMITS, allow_unisolated=True)


def test_limits_that_no_program_fits_in_are_an_error_and_not_a_score() -> None:
    limits = Limits(seconds=1.0, memory_mb=1, disk_mb=4, processes=4, output_kb=64)
    with pytest.raises(SandboxError, match=r"an empty program does not run within Limits.*memory_mb=1,"):
        run_program("", [InputOutput("", "")], limits, allow_unisolated=True)


# Breaking out.


@pytest.mark.usefixtures("isolated")
def test_no_environment_variable_of_the_parent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t" + MARK)
    result = run(
        f"""
        import os, subprocess, sys
        print(dict(os.environ))
        for pid in ["self", 1, os.getppid(), {os.getpid()}]:
            try:
                print(open(f"/proc/{{pid}}/environ").read())
            except OSError as error:
                print(error)
        print(subprocess.run([sys.executable, "-c", "import os; print(os.environ)"], capture_output=True))
        """,
        stdout="never",
    )
    assert result.kind == "wrong"
    assert "PYTHONHASHSEED" in result.output and "s3cr3t" not in result.output


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "path", [__file__, ROOT / "params.yaml", "/etc/passwd", "/proc/1/cmdline", "/sys", "/var", Path.home()]
)
def test_no_file_of_the_machine_is_found(path: str | Path) -> None:
    # The home directory may exist as a way to Python, but holds nothing else.
    result = run(
        f"""
        import os
        path = {str(path)!r}
        if os.path.isdir(path):
            import sys
            print([name for name in os.listdir(path) if not sys.prefix.startswith(os.path.join(path, name))])
        else:
            print([open(path).read()] if os.path.exists(path) else [])
        """,
        stdout="[]",
    )
    assert result.kind == "ok", result.output


@pytest.mark.usefixtures("isolated")
def test_nothing_can_be_written_outside_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(
        f"""
        import os, sys
        for place in ["/", "/usr/lib", "/lib", "/dev", "/etc", sys.prefix, {str(tmp_path)!r}, "/dev/shm", "/var/tmp"]:
            try:
                open(place + "/{MARK}", "w").write("out")
                print(place)
            except OSError:
                pass
        for change in (lambda: os.remove(os.__file__), lambda: os.chmod(os.__file__, 0o777), lambda: os.mkdir("/x"),
                       lambda: open(os.__file__, "a"), lambda: open(sys.executable, "r+b")):
            try:
                change()
                print("changed")
            except OSError:
                pass
        open("inside", "w").write("kept for as long as the program runs")
        open("/tmp/inside too", "w").write("kept for as long as the program runs")
        """,
    )
    assert result.kind == "ok", result.output
    assert list(tmp_path.iterdir()) == []
    assert not [place for place in ("/", "/usr/lib", "/dev", "/etc", "/tmp", "/dev/shm") if Path(place, MARK).exists()]


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("wait", ["", "os.setsid()", "time.sleep(0.001)"])
def test_a_fork_bomb_is_small_and_dies(wait: str) -> None:
    source = f"""
    {CALL_ITSELF.strip()}
    import os, time
    while True:
        try:
            if os.fork() == 0:
                {wait or "pass"}
        except OSError:
            pass
    """
    most = 0
    bomb = subprocess.Popen([sys.executable, "-c", _run_in_child(source)], cwd=ROOT)
    while bomb.poll() is None:
        most = max(most, len(marked_processes()))
        time.sleep(0.05)
    assert bomb.returncode == 0
    assert 1 < most <= LIMITS.processes
    assert_nothing_marked_runs()


def _run_in_child(source: str) -> str:
    return (
        "from rlhf_core.reward.sandbox import *\n"
        f"r = run_program({textwrap.dedent(source)!r}, [InputOutput('', '')], {SHORT!r}, allow_unisolated=False)\n"
        "assert r.kind == 'timeout', r"
    )


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("files", [1, 100])
def test_the_disk_can_not_be_filled(files: int) -> None:
    # One file of 100 MiB, and 100 files of 1 MiB; 4 MiB are allowed, of which the program itself takes some KiB.
    result = run(
        f"""
        written = 0
        try:
            for number in range({files}):
                with open(str(number), "wb", buffering=0) as file:
                    for _ in range(10 * {100 // files}):
                        written += file.write(bytes(2**20 // 10))
        except OSError as error:
            print(error.strerror)
        assert 3 * 2**20 < written <= 4 * 2**20, written
        """
    )
    assert (result.kind, result.output.strip()) == ("wrong", "No space left on device")


@pytest.mark.usefixtures("isolated")
def test_many_small_files_are_too_many() -> None:
    source = "for number in range(10**6): open(str(number), 'w').close()"
    assert "No space left on device" in run(source).output


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "way",
    [
        "x = []\nwhile True: x.append(bytes(2**20))",
        "import mmap\nx = [mmap.mmap(-1, 2**24) for _ in range(1000)]",
        "import sys; sys.setrecursionlimit(10**9)\nx = '(' * 10**9",
    ],
)
def test_memory_ends_at_its_limit(way: str) -> None:
    result = run(way)
    assert result.kind == "memory" or "Cannot allocate memory" in result.output, result


@pytest.mark.usefixtures("isolated")
def test_memory_that_no_limit_counts_can_not_be_had() -> None:
    result = run(
        """
        import ctypes, os
        try:
            os.memfd_create("x")
            print("memfd")
        except OSError:
            pass
        if ctypes.CDLL(None).shmget(0, 2**20, 0o1600) != -1:
            print("shm")
        """
    )
    assert result.kind == "ok", result.output


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_more_output_than_the_limit_is_kept(stream: str) -> None:
    result = run(f"import sys\nwhile True: sys.{stream}.write('x' * 100000)")
    assert result.kind == "output"
    assert len(result.output) == LIMITS.output_kb * 1024


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("family", ["inet", "unix", "vsock", "netlink"])
def test_no_listener_can_be_reached(family: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        port = listener.getsockname()[1]
        address = {"inet": ("127.0.0.1", port), "unix": "\0x", "vsock": (2, port), "netlink": (0, 0)}[family]
        result = run(
            f"""
            import errno, socket
            try:
                socket.socket(getattr(socket, "AF_{family.upper()}", 40)).connect({address!r})
                print("connected")
            except OSError as error:
                print(errno.errorcode[error.errno])
            """,
            stdout="EPERM",
        )
        assert result.kind == "ok", result.output
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_the_listener_of_the_test_above_can_be_reached_from_outside() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()):
            listener.settimeout(5)
            listener.accept()[0].close()


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "way",
    [
        "os.setsid()",
        "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)",
        "for number in set(signal.Signals) - {9, 19}: signal.signal(number, signal.SIG_IGN)",
    ],
)
def test_nothing_survives_its_timeout(way: str) -> None:
    # The double fork ends the program itself at once: then what it left running ends with it, before the timeout.
    source = CALL_ITSELF + "import os, signal, time\n" + way + "\nwhile True: time.sleep(0.1)"
    result = run(source, limits=LIMITS if "_exit" in way else SHORT)
    assert result.kind == ("ok" if "_exit" in way else "timeout")
    assert_nothing_marked_runs()


@pytest.mark.usefixtures("isolated")
def test_nothing_survives_the_death_of_the_stage(tmp_path: Path) -> None:
    source = CALL_ITSELF + "import os, time\nos.setsid()\nwhile True: time.sleep(0.1)"
    stage = subprocess.Popen(
        [sys.executable, "-c", _run_in_child(source).replace("seconds=1.0", "seconds=60.0")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    until = time.monotonic() + 20
    while not marked_processes() and time.monotonic() < until:
        time.sleep(0.02)
    assert marked_processes()
    stage.kill()
    stage.wait()
    assert_nothing_marked_runs()


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("target", ["the stage", "os.getppid()", "-1", "1"])
def test_the_parent_can_not_be_killed(target: str) -> None:
    target = target.replace("the stage", str(os.getpid()))
    old = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("a signal arrived"))
    try:
        result = run(
            f"""
            import os, signal
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP):
                try:
                    os.kill({target}, number)
                except OSError:
                    pass
            print("here")
            """,
            stdout="here",
        )
    finally:
        signal.signal(signal.SIGTERM, old)
    assert result.kind == "ok"


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "way",
    [
        "os.setuid(0)",
        "os.setgid(0)",
        "os.setgroups([0])",
        "os.chroot('.')",
        "check(libc.unshare(0x10000000))",  # a user namespace of its own
        "check(libc.mount(b'x', b'/box', b'tmpfs', 0, None))",
        "check(libc.ptrace(16, os.getppid(), 0, 0))",
        "check(libc.syscall(425, 8, ctypes.create_string_buffer(120)))",  # io_uring_setup
        "check(libc.syscall(56, 0x10000011, 0, 0, 0, 0) if os.uname().machine == 'x86_64' else -1)",  # clone
        "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))",
    ],
)
def test_rights_and_limits_do_not_come_back(way: str) -> None:
    result = run(
        f"""
        import ctypes, os, resource
        libc = ctypes.CDLL(None, use_errno=True)
        def check(result):
            if result == -1:
                raise OSError(ctypes.get_errno(), "refused")
        try:
            {way}
            print("done")
        except (OSError, ValueError):
            pass
        """
    )
    assert result.kind == "ok", result.output


@pytest.mark.usefixtures("isolated")
def test_the_input_can_not_be_changed_and_no_other_file_is_open() -> None:
    result = run(
        """
        import os
        try:
            os.write(0, b"x")
            print("written")
        except OSError:
            pass
        for fd in range(3, 64):
            try:
                os.fstat(fd)
                print(fd)
            except OSError:
                pass
        """,
        stdin="1\n",
    )
    assert result.kind == "ok", result.output


# Platforms.

LACKING = (
    'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "$@"'
)


def lacking(code: str) -> "subprocess.CompletedProcess[str]":
    """Run code where no namespaces are to be had: root of a user namespace without the right to make any."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None or missing_layers():
        pytest.skip("needs unshare and setpriv, and namespaces to take away")
    command = ["unshare", "-Ur", "sh", "-c", LACKING, "sh", sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_without_namespaces_the_missing_layers_are_named_and_programs_refused() -> None:
    done = lacking(
        "from rlhf_core.reward.sandbox import *\n"
        "print(missing_layers())\n"
        f"run_program('print(1)', [InputOutput('', '1')], {SHORT!r}, allow_unisolated=False)"
    )
    assert done.stdout.strip() == "('network', 'filesystem', 'processes', 'process limit', 'user')"
    assert done.stderr.strip().splitlines()[-1] == (
        "rlhf_core.errors.SandboxError: programs are not run here: the platform lacks isolation of network, filesystem,"
        " processes, process limit, user (docs/sandbox.md says what each stops, and what provides it). Set"
        " allow_unisolated: true only for programs you trust"
    )


def test_without_namespaces_forced_programs_run_with_what_is_left() -> None:
    sources = [
        "print(1)",
        "while True: pass",
        "import os; print(os.environ); x = bytearray(10**9)",
        "import socket; socket.socket()",
        "open('x', 'wb').write(bytes(5 * 2**20))",
    ]
    done = lacking(
        "from rlhf_core.reward.sandbox import *\n"
        f"for source in {sources!r}:\n"
        f"    limits = {SHORT!r} if 'while' in source else {LIMITS!r}\n"
        "    r = run_program(source, [InputOutput('', '1')], limits, allow_unisolated=True)\n"
        "    print(r.kind)"
    )
    assert done.stdout.split() == ["ok", "timeout", "memory", "error", "error"], done.stderr


def test_an_ordinary_user_has_all_layers() -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    if shutil.which("unshare") is None or shutil.which("setpriv") is None or missing_layers():
        pytest.skip("needs unshare and setpriv, and all layers as root")
    script = """
        mount --bind "$2" "$1/python"; mount --bind "$3" "$1/code"; cd "$1/code"
        exec setpriv --reuid=12345 --regid=12345 --clear-groups env -i "$1/python/bin/$4" -c "$5"
    """
    code = (
        "from rlhf_core.reward.sandbox import *\n"
        's = \'import os; print(os.getuid(), os.getppid()); open("/x", "w")\'\n'
        f"print(missing_layers(), run_program(s, [InputOutput('', '')], {LIMITS!r}, allow_unisolated=False))"
    )
    python = Path(sys.executable).resolve()
    if python.parent != Path(sys.base_prefix, "bin"):
        pytest.skip(f"Python is not in {sys.base_prefix}/bin")
    place = Path(tempfile.mkdtemp())  # not pytest's: others may not enter that
    place.chmod(0o755)
    for name in ("python", "code"):
        (place / name).mkdir()
    arguments = [str(place), sys.base_prefix, str(ROOT), python.name, code]
    command = ["unshare", "-m", "sh", "-ec", script, "sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    for path in (place / "python", place / "code", place):
        path.rmdir()  # and nothing below it, should something be mounted there
    assert done.stdout.startswith("() Result(passed=0, total=1, kind='error', output='12345 1\\n"), done
    assert "Read-only file system" in done.stdout
