"""data/pruned.json: which checkpoints `rlhf prune` dropped, so that a missing one is known from a lost one.

Small and tracked by git, as dvc.lock is. An entry counts as long as its path is missing; one that was made again is
whole.
"""

import json
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError
from rlhf_core.report.dvc_lock import Out
from rlhf_core.stage import write_json

PRUNED = Path("data/pruned.json")


def read_pruned(root: Path) -> dict[str, str]:
    """Return path -> MD5 of what was dropped and is still missing.

    Raises:
        ArtifactError: If the file is damaged.
    """
    return {path: entry["md5"] for path, entry in _entries(root).items() if not (root / path).exists()}


def remember_pruned(root: Path, outs: list[Out]) -> None:
    """Add outputs that are about to be dropped."""
    write_json(root / PRUNED, _entries(root) | {out.path: {"md5": out.md5, "bytes": out.size} for out in outs})


def _entries(root: Path) -> dict[str, dict[str, Any]]:
    if not (root / PRUNED).is_file():
        return {}
    try:
        found = json.loads((root / PRUNED).read_text(encoding="utf-8"))
        return {str(path): {"md5": str(entry["md5"]), "bytes": int(entry["bytes"])} for path, entry in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{root / PRUNED}: damaged ({error}); take it from git, or delete it") from None
