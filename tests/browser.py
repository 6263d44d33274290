"""A real browser for a page: what it shows after its scripts had their chance to run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browser() -> str:
    """The program to run: RLHF_CHROMIUM, or a Chromium on PATH; the test is skipped without one."""
    found = os.environ.get("RLHF_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: install one of {', '.join(NAMES)}, or name its program in RLHF_CHROMIUM")
    return found


def opened(page: Path, profile: Path) -> str:
    """The document as the browser has it after loading a file: HTML.

    Args:
        page: The file.
        profile: An empty or missing directory of the browser's own.
    """
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    command = [browser(), *options, "--dump-dom", page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
