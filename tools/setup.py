"""Make the project's own .venv from the pinned locks; do nothing when it is up to date.

Standard library only, and parsable by Python 3.8, so that an old interpreter gets a sentence instead of a syntax
error. Nothing outside the project is written, except pip's own download cache.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".setup.json"
UNFINISHED = VENV / ".setup-unfinished"

OLDEST = (3, 11)
PREFERRED = "python3.11"  # the version that the locks were run with
OTHERS = ("python3.12", "python3.13")
FREE_GB = {"cpu": 10, "gpu": 30}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class SetupError(Exception):
    """Set-up cannot go on; the text says why and what to do."""


def main():
    """Bring .venv to the state that the locks describe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accel", choices=("cpu", "gpu", ""), default="", help="default: as before, or cpu")
    parser.add_argument("--dev", action="store_true", help="also what tests and lint need")
    parser.add_argument(
        "--this-python", action="store_true", help="never look for another interpreter that fits better"
    )
    arguments = parser.parse_args()
    try:
        check_machine(platform.system(), platform.machine())
        use_new_enough_python(sys.version_info[:2], arguments.this_python)
        (ROOT / ".dvc" / "tmp").mkdir(parents=True, exist_ok=True)
        with (ROOT / ".dvc" / "tmp" / "setup.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second `make` waits here and then finds everything done
            set_up(arguments.accel, arguments.dev)
    except SetupError as error:
        sys.exit("setup: {}".format(error))
    except subprocess.CalledProcessError as error:
        sys.exit(
            "setup: this command failed (exit code {}); its own message is above.\n  {}\n"
            "Run `make setup` again when the cause is gone; it starts from a clean .venv.".format(
                error.returncode, " ".join(str(part) for part in error.cmd)
            )
        )


def check_machine(system, machine):
    """Refuse platforms for which the locks have no wheels."""
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise SetupError(
            "found {} on {}; the locks and vLLM's CPU build need Linux on x86_64 "
            "(a virtual machine or WSL 2 is fine).".format(system, machine)
        )


def use_new_enough_python(version, fixed):
    """Go on as it is, or start again under a Python that fits; PYTHON=... on make's command line fixes the choice."""
    if version == OLDEST:
        return
    candidates = () if fixed else (PREFERRED,) if version > OLDEST else (PREFERRED,) + OTHERS
    for name in candidates:
        path = shutil.which(name)
        if path and not os.environ.get("RLHF_SETUP_RESTARTED") and works(path):
            print("setup: using {} instead of Python {}.{}".format(path, *version), flush=True)
            os.execve(path, [path, *sys.argv], dict(os.environ, RLHF_SETUP_RESTARTED="1"))
    if version < OLDEST:
        raise SetupError(
            "this is Python {}.{} ({}); 3.11 or newer is needed, and none is on PATH. Install Python 3.11, or name it:"
            " make setup PYTHON=/path/to/python3.11".format(version[0], version[1], sys.executable)
        )


def works(python):
    """Tell whether this interpreter starts and can make virtual environments (a shim on PATH may do neither)."""
    probe = [python, "-c", "import venv, ensurepip"]
    return subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def set_up(accel, dev):
    """Install what the stamp says is missing."""
    stamp = read_stamp()
    accel = accel or stamp.get("accel", "cpu")
    dev = dev or bool(stamp.get("dev"))
    wanted = {
        "accel": accel,
        "root": str(ROOT),  # paths inside .venv are absolute: a moved project needs a new one
        "main": file_hash(ROOT / "requirements" / (accel + ".txt")),
        "dev": file_hash(ROOT / "requirements" / "dev.txt") if dev else "",
        "setup": file_hash(Path(__file__)),
    }
    if stamp == wanted:
        return
    new = (
        not PYTHON.exists()
        or UNFINISHED.exists()
        or any(stamp.get(k, wanted[k]) != wanted[k] for k in ("accel", "root"))
    )
    if new:
        check_disk(shutil.disk_usage(str(ROOT)).free, accel)
        make_venv()
    UNFINISHED.touch()
    if new or stamp.get("main") != wanted["main"]:
        install_main(ROOT / "requirements" / (accel + ".txt"))
    if dev and (new or stamp.get("dev") != wanted["dev"]):
        pip_install("-r", ROOT / "requirements" / "dev.txt")
    write_command()
    configure_dvc()
    UNFINISHED.unlink()
    STAMP.write_text(json.dumps(wanted, indent=2, sort_keys=True) + "\n")
    print("setup: .venv is ready ({}{})".format(accel, ", with what tests need" if dev else ""), flush=True)


def read_stamp():
    """Return what the last finished set-up wrote, or {}."""
    if UNFINISHED.exists() or not PYTHON.exists():
        return {}
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def file_hash(path):
    """Return the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_disk(free_bytes, accel):
    """Refuse before a download that cannot fit."""
    free = free_bytes / 1e9
    if free < FREE_GB[accel]:
        raise SetupError(
            "{:.1f} GB are free on the disk of {}; about {} GB are needed (packages, their download cache, and the "
            "demo's checkpoints). Free some space, or clone the project to a larger disk.".format(
                free, ROOT, FREE_GB[accel]
            )
        )


def make_venv():
    """Make an empty .venv in the project."""
    try:
        import ensurepip  # noqa: F401 - Debian leaves these two out of its python3 package
        import venv  # noqa: F401
    except ImportError:
        raise SetupError(
            "{} has no venv module. On Debian or Ubuntu: apt install python3-venv".format(sys.executable)
        ) from None
    print("setup: making .venv with Python {}.{}.{}".format(*sys.version_info[:3]), flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True, env=clean_environment())


def clean_environment():
    """Return the environment without settings that would lead pip or Python outside .venv."""
    ignored = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_HASHES")
    kept = {name: value for name, value in os.environ.items() if name not in ignored}
    return dict(kept, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_USER="0", PIP_ROOT_USER_ACTION="ignore")


def pip_install(*arguments):
    """Install into .venv; every version is pinned and every dependency listed, so nothing is resolved."""
    command = [PYTHON, "-m", "pip", "install", "-qq", "--no-deps", *arguments]
    subprocess.run([str(part) for part in command], check=True, env=clean_environment())


def install_main(lock):
    """Install a lock. torch's CPU build is not on PyPI: the configured sources first, then PyTorch's own index."""
    lines = lock.read_text().splitlines()
    pins = [line for line in lines if re.match(r"[A-Za-z0-9]", line)]
    print("setup: installing {} packages from {} (a few minutes)".format(len(pins), lock.relative_to(ROOT)), flush=True)
    for torch in (pin for pin in pins if re.match(r"torch==.*\+cpu", pin)):
        try:
            pip_install(torch)
        except subprocess.CalledProcessError:
            print("setup: the configured sources have no {}; trying {}".format(torch, TORCH_CPU_INDEX), flush=True)
            pip_install("--index-url", TORCH_CPU_INDEX, torch)
    pip_install("-r", lock)


def write_command():
    """Write .venv/bin/rlhf, which runs the command line of this checkout from any directory."""
    command = VENV / "bin" / "rlhf"
    lines = ("#!{}".format(PYTHON), "import sys", "sys.path.insert(0, {!r})".format(str(ROOT)))
    command.write_text("\n".join([*lines, "from rlhf_core.cli import main", "main()", ""]))
    command.chmod(0o755)


def configure_dvc():
    """Set what depends on this machine, in .dvc/config.local.

    DVC's memo of file hashes is kept in the project; its default place is lost with a container. Where the disk has no
    reflinks, hard links come first: DVC would otherwise keep every checkpoint twice. They are safe because no stage
    writes into a finished file.
    """
    settings = [("core.site_cache_dir", str(ROOT / ".dvc" / "tmp" / "site-cache"))]
    if not has_reflinks(ROOT / ".dvc" / "tmp"):
        settings.append(("cache.type", "hardlink,copy"))
    if not (ROOT / ".git").exists():
        settings.append(("core.no_scm", "true"))  # an unpacked archive: everything works but diffs and experiments
    for name, value in settings:
        command = [str(VENV / "bin" / "dvc"), "config", "--quiet", "--local", name, value]
        subprocess.run(command, check=True, cwd=str(ROOT), env=clean_environment())


def has_reflinks(directory):
    """Tell whether the disk of a directory can copy a file by reference."""
    source, target = directory / ".reflink-source", directory / ".reflink-target"
    source.write_text("x")
    copied = subprocess.run(["cp", "--reflink=always", str(source), str(target)], stderr=subprocess.DEVNULL)
    for path in (source, target):
        if path.exists():
            path.unlink()
    return copied.returncode == 0


if __name__ == "__main__":
    main()
