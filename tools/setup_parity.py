"""Make .venv-parity from requirements/parity.txt, for `make parity`; do nothing when it is up to date."""

import hashlib
import shutil
import subprocess
import sys
import venv

from tools.setup import ROOT, TORCH_CPU_INDEX, clean_environment

LOCK = ROOT / "requirements" / "parity.txt"
VENV = ROOT / ".venv-parity"
STAMP = VENV / ".parity"


def main() -> None:
    """Install the lock into an empty virtual environment of its own."""
    wanted = f"{ROOT}\n{hashlib.sha256(LOCK.read_bytes()).hexdigest()}\n"
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    print(f"parity: making {VENV.name} (a few minutes, 1.7 GB)", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    venv.create(VENV, with_pip=True)
    torch = next(line for line in LOCK.read_text().splitlines() if line.startswith("torch=="))
    # As in tools/setup.py: the configured sources first, then PyTorch's own index.
    if pip_install(torch) and pip_install("--index-url", TORCH_CPU_INDEX, torch):
        sys.exit(f"parity: {torch} could not be installed; pip's own message is above")
    if pip_install("-r", str(LOCK)):
        sys.exit(f"parity: {LOCK.name} could not be installed; pip's own message is above")
    STAMP.write_text(wanted)


def pip_install(*arguments: str) -> int:
    """Install into .venv-parity what is pinned, with nothing resolved, and return pip's exit status."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps", *arguments]
    return subprocess.run(command, env=clean_environment(), check=False).returncode


if __name__ == "__main__":
    main()
