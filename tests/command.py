"""The `rlhf` command in this process."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from unittest import mock

from rlhf_core import cli


def rlhf(*arguments: str, root: Path) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it, in this process to save the start of another; dvc's output is not in it."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(root),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["rlhf", *arguments]),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
