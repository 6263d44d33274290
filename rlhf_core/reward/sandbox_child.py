"""Run one program cut off from the machine. sandbox.py executes this file as a script, in a fresh interpreter.

    launcher (leaves the namespaces of the machine) -> init (process 1 inside, builds the root) -> the program

The program's own limits are set between its fork and its exec, so that nothing of it runs without them. When init ends,
for whatever reason, the kernel kills everything inside. Imports the standard library only: `-I -S` finds nothing else.

Messages to sandbox.py are lines of JSON on a pipe that the program does not have: {"missing": [layers], "started":
bool}, then {"exit": code} or {"signal": number}; {"setup": text} when what should have worked did not.

Sources: the manual pages unshare(2), pivot_root(2), mount_setattr(2), user_namespaces(7), pid_namespaces(7),
seccomp(2), prctl(2), setrlimit(2); the order of steps follows them.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from_libc = ctypes.CDLL(None, use_errno=True)

# What each layer stops is told in docs/sandbox.md.
LAYERS = ("network", "filesystem", "processes", "process limit", "user", "new privileges", "system calls")

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount, uts, ipc, pid, network
NEW_USER = 0x10000000
ANY_NAMESPACE = NEW_NAMESPACES | NEW_USER | 0x02000000  # and cgroup
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 4096, 16384, 1 << 18, 2, 4
MNT_DETACH = 2
MOUNT_SETATTR, AT_RECURSIVE, ATTR_RDONLY_NOSUID_NODEV = (
    442,
    0x8000,
    0x1 | 0x2 | 0x4,
)  # the number is the same everywhere
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
OPEN_FILES = 64
FILES = 4096
OWN_DIRECTORY = "box"

# System calls that no program under test needs. Several reach over namespaces (virtual machine sockets are not part of
# the network namespace), keep memory that no limit counts (memfd, System V shared memory), or have often been the way
# into the kernel. clone is refused with namespace flags only; clone3 counts as absent: the C library then uses clone.
# In this order: socket, shmget, semget, msgget, ptrace, pivot_root, mount, umount2, init_module, mq_open, kexec_load,
# add_key, request_key, keyctl, unshare, perf_event_open, open_by_handle_at, setns, process_vm_readv, process_vm_writev,
# finit_module, memfd_create, bpf, userfaultfd.
X86_64 = "41 29 64 68 101 155 165 166 175 240 246 248 249 250 272 298 304 308 310 311 313 319 321 323"
AARCH64 = "198 194 190 186 117 41 40 39 105 180 104 217 218 219 97 241 265 268 270 271 273 279 280 282"
DENIED = {  # machine -> its name in seccomp's data, the number of clone, those above
    "x86_64": (0xC000003E, 56, [int(number) for number in X86_64.split()]),
    "aarch64": (0xC00000B7, 220, [int(number) for number in AARCH64.split()]),
}
# With one number everywhere: io_uring_setup, _enter, _register, open_tree, move_mount, fsopen, fsconfig, fsmount,
# pidfd_getfd, mount_setattr, memfd_secret.
DENIED_EVERYWHERE = [425, 426, 427, 428, 429, 430, 431, 432, 438, 442, 447]
CLONE3 = 435


def main(request_path: str, status_fd: int) -> None:
    """Run the program that a request describes; report on status_fd."""
    request = json.loads(Path(request_path).read_text())
    os.set_inheritable(status_fd, False)
    os.umask(0o022)
    with suppress(OSError):  # a convenience, where there is such a thing
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, this goes first
    missing, uid = leave_namespaces()
    die_with_parent()
    if os.getppid() != request["parent"]:
        return  # it died before this process asked to die with it
    alive, held = os.pipe()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.close(held)
    die_with_parent()
    if select.select([alive], [], [], 0)[0]:  # closed: the launcher died before this process asked to die with it
        os._exit(1)
    try:
        init(request, status_fd, uid, missing)
    except OSError as error:
        report(status_fd, {"setup": str(error)})
    os._exit(0)


def other_user() -> int | None:
    """Return a user id that nobody else has, to become when run as root; None when there is none to become.

    One of its own for each run, so that the kernel's limit on a user's processes is this run's limit.
    """
    if os.geteuid() != 0:
        return None
    ranges = [[int(part) for part in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for uid in (2**30 + os.getpid(), 65534):
        if any(first <= uid < first + count for first, _, count in ranges):
            return uid
    return None


def leave_namespaces() -> tuple[list[str], int | None]:
    """Enter own mount, network, process, IPC and host name namespaces.

    As root directly; otherwise, or where root may not, inside an own user namespace that holds one user.

    Returns:
        (the layers that cannot be had, the user to become in the end or None to stay who we are).
    """
    if sys.platform != "linux":
        return list(LAYERS), None
    uid = other_user()
    if uid is not None and from_libc.unshare(NEW_NAMESPACES) == 0:
        return [], uid
    user, group = os.geteuid(), os.getegid()
    if from_libc.unshare(NEW_NAMESPACES | NEW_USER) != 0:
        return list(LAYERS[:5]), None
    # Never user 0 inside: what is not user 0 loses all capabilities at exec.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user or 65534} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group or 65534} {group} 1")
    return ([] if user else ["process limit"]), None  # the kernel does not count root's processes


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        check(from_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with the parent")


def init(request: dict[str, Any], status_fd: int, uid: int | None, missing: list[str]) -> None:
    """Build the root, start the program, wait for it, report how it ended. Runs as process 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "filesystem" not in missing:
        try:
            build_root(request, uid)
        except OSError as error:
            missing = [*missing, f"filesystem ({error})"]
    if os.getcwd() != f"/{OWN_DIRECTORY}":
        os.chdir(request["directory"])
        if uid is not None:  # stay who we are: another user may not be able to read Python
            uid, missing = None, [*missing, "user"]
    if sys.platform == "linux" and os.uname().machine not in DENIED:
        missing = [*missing, "system calls"]
    runs = not missing or request["allow_unisolated"]
    report(status_fd, {"missing": missing, "started": runs})
    if not runs:
        return
    for name, text in request["files"].items():
        Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")
        Path(name).chmod(0o644)
    program = os.fork()
    if program == 0:
        try:
            become_program(request, uid)
        except (OSError, ValueError) as error:
            report(status_fd, {"setup": str(error)})
        os._exit(127)
    while True:
        pid, status = os.wait()  # orphans too
        if pid == program:
            break
    code = os.waitstatus_to_exitcode(status)
    report(status_fd, {"exit": code} if code >= 0 else {"signal": -code})


def build_root(request: dict[str, Any], uid: int | None) -> None:
    """Replace the root by a read-only one that holds Python, the system's libraries and an empty, limited /box.

    No /proc, no /etc but the linker's cache, no other program than Python, nothing of the caller's.
    """
    root = Path(request["directory"]) / "root"
    owner = os.geteuid() if uid is None else uid
    limit = f"size={request['disk_mb']}m,nr_inodes={FILES},mode=700,uid={owner}"
    mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    devices = ["/dev/null", "/dev/zero", "/dev/urandom"]
    for path in [*request["visible"], *devices]:
        source, target = Path(path), root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        if not source.is_symlink() and path not in devices:
            mount(path, target, None, MS_BIND | MS_REC, None)
    own = root / OWN_DIRECTORY
    own.mkdir()
    if not (root / "tmp").exists():  # Python itself may be in there
        (root / "tmp").symlink_to(OWN_DIRECTORY)
    read_only(root)
    for path in devices:
        mount(path, root / path.lstrip("/"), None, MS_BIND, None)
    mount("tmpfs", own, "tmpfs", MS_NOSUID | MS_NODEV, limit)
    os.chdir(root)
    check(from_libc.sethostname(b"sandbox", 7), "set the host name")
    check(from_libc.pivot_root(b".", b"."), "pivot_root")
    check(from_libc.umount2(b".", MNT_DETACH), "leave the old root")
    os.chdir(f"/{OWN_DIRECTORY}")


def become_program(request: dict[str, Any], uid: int | None) -> None:
    """Give up all rights, take on all limits, and become the program."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    die_with_parent()
    set_limits(request)
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        check(from_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        if os.uname().machine in DENIED:
            deny_system_calls(os.uname().machine)
    os.execve(request["argv"][0], request["argv"], request["environment"])


def set_limits(request: dict[str, Any]) -> None:
    """Set the limits of this process, and of all that it starts."""
    mebibyte = 2**20
    cpu = int(request["seconds"]) + 1  # the clock on the wall comes first, unless several threads compute
    limits = {
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_CPU": (cpu, cpu + 1),  # the first is a signal that says why
        "RLIMIT_AS": (request["memory_mb"] * mebibyte,) * 2,
        "RLIMIT_FSIZE": (request["disk_mb"] * mebibyte,) * 2,
        "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES),
        "RLIMIT_NPROC": (request["processes"],) * 2,
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_MSGQUEUE": (0, 0),
    }
    for name, wanted in limits.items():
        if hasattr(resource, name):
            number = getattr(resource, name)
            most = resource.getrlimit(number)[1]  # what this process was given already may be less
            soft, hard = (value if most == resource.RLIM_INFINITY else min(value, most) for value in wanted)
            resource.setrlimit(number, (soft, hard))


def deny_system_calls(machine: str) -> None:
    """Install the filter: the calls of DENIED fail with "operation not permitted", clone3 with "not implemented"."""
    architecture, clone, numbers = DENIED[machine]
    load, equal, at_least, any_bit, stop = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (stop, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (stop, 0, 0, refuse)]  # the second set of numbers on x86_64
    for number in [*numbers, *DENIED_EVERYWHERE]:
        lines += [(equal, 0, 1, number), (stop, 0, 0, refuse)]
    lines += [(equal, 0, 1, CLONE3), (stop, 0, 0, absent)]
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, ANY_NAMESPACE), (stop, 0, 0, refuse)]
    lines += [(stop, 0, 0, allow)]

    class Line(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("lines", ctypes.POINTER(Line))]

    array = (Line * len(lines))(*(Line(*line) for line in lines))
    program = Program(len(lines), array)
    check(from_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "filter system calls")


def mount(source: str | None, target: str | Path, kind: str | None, flags: int, options: str | None) -> None:
    """Call mount(2)."""
    texts = [None if text is None else str(text).encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    check(from_libc.mount(*texts, ctypes.c_ulong(flags), data), f"mount on {target}")


def read_only(root: Path) -> None:
    """Make a mount and all below it read-only, without set-user-id programs and devices. Linux 5.12 or newer."""
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    result = from_libc.syscall(MOUNT_SETATTR, -100, bytes(root), AT_RECURSIVE, ctypes.byref(attributes), 32)
    check(result, "make the root read-only")


class _Refused(OSError):
    """The kernel did not do what it was asked."""


def check(result: int, doing: str) -> None:
    """Raise OSError when a call of the C library failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise _Refused(number, f"{doing}: {os.strerror(number)}")


def report(status_fd: int, message: dict[str, Any]) -> None:
    """Send one line to sandbox.py."""
    os.write(status_fd, (json.dumps(message) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
