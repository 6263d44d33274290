"""Training that goes on where it was killed: its whole state, every so many steps, in the stage's work directory.

A save is a directory with two files: the tensors (safetensors) and everything else (JSON, with the tensors' hash). It
is written under a hidden name, flushed and renamed, so it is whole or absent; only then is the one before it removed.
Left out: what a state consists of (optimizer.py, ppo.py, reward_model.py).
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.errors import DiskError
from rlhf_core.stage import fsync_directory, write_json
from rlhf_core.training.distributed import Processes

logger = logging.getLogger("rlhf")

_TENSORS = "tensors.safetensors"
_FACTS = "facts.json"


@dataclass(frozen=True)
class Saves:
    """Where the state of a training stage is kept, and how often."""

    directory: Path  # inside the stage's work directory, so for these inputs, parameters and code alone
    every: int  # steps; 0 = never
    processes: Processes  # of which the main one writes, and all read

    def due(self, done: int) -> bool:
        """Whether the state is to be kept after so many steps."""
        return self.every > 0 and done % self.every == 0

    def write(self, done: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep a state, and remove the one before it. Where the disk has no room, say so and train on.

        Args:
            done: Steps taken to get there.
            tensors: By name; none shares memory with another.
            facts: JSON values.
        """
        if not self.processes.is_main:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        finished, unfinished = self.directory / f"{done:08d}", self.directory / f".{done:08d}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        before = self._names()
        try:
            unfinished.mkdir()
            save_file({name: _on_cpu(tensor) for name, tensor in tensors.items()}, unfinished / _TENSORS)
            _flush(unfinished / _TENSORS)
            hashes = {"tensors": hash_path(unfinished / _TENSORS), "facts": _hash(facts)}
            write_json(unfinished / _FACTS, {"sha256": hashes, "facts": facts})
            fsync_directory(unfinished)
            os.replace(unfinished, finished)
            fsync_directory(self.directory)
        except (OSError, DiskError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            logger.warning("step %d: the state of training could not be kept (%s); training goes on", done, error)
            return
        for name in before:
            shutil.rmtree(self.directory / name)

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the tensors and facts that training goes on from, or None. All processes must call it.

        A damaged save is no save. Where not all processes find the same one, as on machines without a common disk,
        there is none. Whatever else lies in the directory is removed.
        """
        found, used, digest = None, None, None
        for name in reversed(self._names()):
            try:
                content = json.loads((self.directory / name / _FACTS).read_text(encoding="utf-8"))
                hashes = {"tensors": hash_path(self.directory / name / _TENSORS), "facts": _hash(content["facts"])}
                if hashes != content["sha256"]:
                    raise ValueError("it is not what was written")
                found, used, digest = (load_file(self.directory / name / _TENSORS), content["facts"]), name, content
                break
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                logger.warning("%s cannot be read and is not used: %s", self.directory / name, error)
        if any(other != digest for other in self.processes.gathered(digest)):
            found, used = None, None
        if self.processes.is_main and self.directory.is_dir():
            for path in self.directory.iterdir():
                if path.name != used:
                    shutil.rmtree(path)
        return found

    def _names(self) -> list[str]:
        """Names of the whole saves, the oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(path.name for path in self.directory.iterdir() if not path.name.startswith("."))


def _hash(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _flush(path: Path) -> None:
    """Make a written file durable."""
    with path.open("rb+") as handle:
        os.fsync(handle.fileno())
