"""Other revisions of the project, as git has them: which outputs each refers to, and where its chains end."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

# dvc.lock by its lines: the YAML reader takes seconds for one of 200 stages, and every experiment has one.
_ENTRY = re.compile(r"- path: (\S+)\n\s+hash: md5\n\s+md5: (\S+)\n")


@dataclass(frozen=True, slots=True)
class Revision:
    """dvc.lock and iterations.yaml of one branch, tag or experiment."""

    name: str
    lasting: bool  # what it ends with has to stay: a tag, or not merely an earlier state of what is checked out
    files: frozenset[tuple[str, str]]  # (path, MD5) of what its stages read and write
    previous: Mapping[str, str]  # iteration -> the one that it starts from

    def heads(self) -> list[tuple[str, str]]:
        """Return (path, MD5) of the checkpoints that its chains end with."""
        ends = set(heads(self.previous))
        return [(path, md5) for path, md5 in self.files if _is_checkpoint(path) and Path(path).name in ends]


def heads(previous: Mapping[str, str]) -> list[str]:
    """Return the iterations that no other starts from."""
    started = set(previous.values())
    return [name for name in previous if name not in started]


def revisions(root: Path) -> list[Revision]:
    """Return the tip of every branch (remote ones too), tag and experiment that has a dvc.lock; [] without git."""
    if shutil.which("git") is None:
        return []
    found = []
    earlier = set((_git(root, "rev-list", "HEAD") or "").split())
    for line in (_git(root, "for-each-ref", "--format=%(refname) %(objectname) %(*objectname)") or "").splitlines():
        name, commit, *peeled = line.split()
        commit = peeled[0] if peeled else commit  # an annotated tag points to its commit
        lock = _git(root, "show", f"{commit}:./dvc.lock")
        if lock is not None:
            previous = _previous(_git(root, "show", f"{commit}:./iterations.yaml") or "")
            lasting = name.startswith("refs/tags/") or commit not in earlier
            short = name.removeprefix("refs/").removeprefix("heads/").replace("tags/", "tag ", 1)
            found.append(Revision(short, lasting, frozenset(_ENTRY.findall(lock)), previous))
    return found


def _previous(text: str) -> dict[str, str]:
    try:
        return dict(_pairs(YAML(typ="safe").load(text)))
    except (YAMLError, AttributeError, KeyError, TypeError):
        return {}  # of an older or a foreign form: then it has no chains


def _pairs(content: dict[str, dict[str, dict[str, str]]]) -> Iterator[tuple[str, str]]:
    for name, entry in content["iterations"].items():
        yield str(name), str(entry["prev"])


def _is_checkpoint(path: str) -> bool:
    return path.startswith("data/checkpoints/")


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None when it fails, for instance because there is no such file in that revision."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
