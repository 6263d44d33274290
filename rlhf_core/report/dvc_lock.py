"""What dvc.lock records: for each stage that ran, its inputs and outputs with their hashes, and where DVC keeps them.

DVC hashes a file by MD5, and a directory by the MD5 of a JSON list of its files' names and hashes; that list is kept in
the cache as an object named with the suffix .dir.
"""

import configparser
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Out:
    """One output of a stage."""

    path: str
    stage: str
    md5: str  # with the suffix .dir for a directory
    size: int  # bytes


@dataclass(frozen=True)
class Lock:
    """dvc.lock of a project; empty where nothing ran yet."""

    root: Path
    stages: Mapping[str, Mapping[str, str]]  # stage -> path of each input -> MD5
    outs: Mapping[str, Out]  # by path

    @cached_property
    def cache(self) -> Path:
        """Where DVC keeps its objects: cache.dir of the project's configuration (relative to .dvc), or .dvc/cache."""
        config = configparser.ConfigParser(strict=False, interpolation=None)
        try:
            config.read([self.root / ".dvc" / name for name in ("config", "config.local")], encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ArtifactError(f"{self.root / '.dvc'}: its configuration cannot be read: {error}") from None
        return self.root / ".dvc" / config.get("cache", "dir", fallback="cache") / "files" / "md5"

    def object(self, md5: str) -> Path:
        """Return where an object is in the cache, whether or not it is there."""
        return self.cache / md5[:2] / md5[2:]

    def files(self, md5: str) -> dict[str, str] | None:
        """Return relative name -> MD5 of a directory's files; a file is one of no name. None when the list is gone."""
        if not md5.endswith(".dir"):
            return {"": md5}
        try:
            entries = json.loads(self.object(md5).read_text(encoding="utf-8"))
            return {str(entry["relpath"]): str(entry["md5"]) for entry in entries}
        except (OSError, ValueError, KeyError, TypeError):
            return None


def read_lock(root: Path) -> Lock:
    """Read dvc.lock.

    Raises:
        ArtifactError: If it is no such file.
    """
    path = root / "dvc.lock"
    if not path.is_file():
        return Lock(root, {}, {})
    try:
        return parse_lock(root, path.read_text(encoding="utf-8"))
    except (YAMLError, OSError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        what = str(error).splitlines()[0]
        raise ArtifactError(f"{path}: damaged ({what}); take it from git (`git checkout dvc.lock`)") from None


def parse_lock(root: Path, text: str) -> Lock:
    """Return the content of a dvc.lock, such as that of another revision."""
    stages: dict[str, Any] = (YAML(typ="safe").load(text) or {}).get("stages") or {}
    deps = {
        name: {str(dep["path"]): str(dep["md5"]) for dep in stage.get("deps") or [] if "md5" in dep}
        for name, stage in stages.items()
    }
    outs = {
        str(out["path"]): Out(str(out["path"]), name, str(out["md5"]), int(out.get("size", 0)))
        for name, stage in stages.items()
        for out in stage.get("outs") or []
        if "md5" in out
    }
    return Lock(root, deps, outs)


def directory_md5(files: Mapping[str, str]) -> str:
    """Return what DVC calls a directory with these files (relative name -> MD5)."""
    entries = [{"md5": files[name], "relpath": name} for name in sorted(files)]
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"
