"""Drop old checkpoints: from the workspace, and their objects from DVC's cache as far as nothing else refers to them.

What dvc.lock says of them stays, so lineage stays, and `dvc repro --allow-missing` goes on with later iterations. Not
here: results of experiments that no stage refers to any more (`dvc gc`).
"""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config import BASE_ITERATION, Run, load_run
from rlhf_core.disk import disk_error, free_bytes, size_text
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.report.dvc_lock import Lock, Out, read_lock
from rlhf_core.report.metrics import STAGES, read_row
from rlhf_core.report.pruned import remember_pruned
from rlhf_core.report.revisions import Revision, heads, revisions
from rlhf_core.stage import work_root

DEFAULT_METRIC = "eval/score_mean"
PARTS = ("policy", "critic", "optimizer")


@dataclass(frozen=True, slots=True)
class Rule:
    """Which iterations keep their checkpoints; one that any of the three keeps is kept."""

    last: int | None  # the last so many of every chain
    best: int | None  # the so many with the highest metric
    every: int | None  # each whose number is a multiple of this
    metric: str  # for best


@dataclass(frozen=True, slots=True)
class Candidate:
    """One checkpoint directory that may be dropped."""

    out: Out
    bytes: int  # that go; a file and its hard link in the cache count once, one with a link that stays not at all
    objects: tuple[Path, ...]  # in the cache, that nothing else refers to

    @property
    def part(self) -> str:
        """One of PARTS."""
        return Path(self.out.path).parts[2]

    @property
    def iteration(self) -> str:
        """Whose checkpoint it is."""
        return Path(self.out.path).name


def plan(
    root: Path, rule: Rule, parts: Sequence[str], *, outside_cache: bool, say: Callable[[str], None]
) -> list[Candidate]:
    """Return what the rule drops, after showing it, what it frees, and why the others stay.

    Args:
        root: Project directory.
        rule: Which iterations stay.
        parts: Some of PARTS.
        outside_cache: Whether objects go from a cache that is not in the project's directory, too.
        say: Shows one line.

    Raises:
        ConfigError: If a part is unknown. As kept_iterations and needed_paths.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ConfigError(f"--parts {','.join(unknown)}: expected some of {','.join(PARTS)}")
    lock, others = read_lock(root), revisions(root)
    kept, needed = kept_iterations(root, rule), needed_paths(root, lock)
    ends = {path: one.name for one in others if one.lasting for path, md5 in one.heads() if _md5(lock, path) == md5}
    whose = {path: f"{stage} needs it and is not up to date" for path, stage in needed.items()}
    whose |= {path: f"the last of {name}" for path, name in ends.items()}
    inside = lock.cache.resolve().is_relative_to(root.resolve())
    chosen = candidates(lock, others, parts, names=kept, paths=whose, objects=inside or outside_cache)
    for name, why in kept.items():
        say(f"keep {name}: {why}")
    for path, why in sorted(whose.items()):
        if _is_checkpoint(path, parts) and Path(path).name not in kept:
            say(f"keep {path}: {why}")
    by_iteration = defaultdict(list)
    for candidate in chosen:
        by_iteration[candidate.iteration].append(f"{candidate.part} {size_text(candidate.bytes)}")
    for name, sizes in by_iteration.items():
        say(f"drop {name}: {', '.join(sizes)}")
    if chosen and not inside and not outside_cache:
        say(
            f"{lock.cache} is outside this project, so what it holds stays; --outside-cache drops that too, if no other"
            " project uses it"
        )
    total = size_text(sum(candidate.bytes for candidate in chosen))
    say(f"{len(by_iteration)} iterations, {total} to free; {size_text(free_bytes(root))} are free now")
    return chosen


def kept_iterations(root: Path, rule: Rule) -> dict[str, str]:
    """Return iteration -> why its checkpoints stay, by the rule and by what is always kept: heads of chains.

    Raises:
        ConfigError: If there is no rule. RlhfError: If no iteration has the metric.
    """
    if rule.last is rule.best is rule.every is None:
        raise ConfigError("say which checkpoints to keep: --keep-last N, --keep-best N, --every K, or several of them")
    run = load_run(root)
    kept = {BASE_ITERATION: "the base model"}
    for head in heads({name: entry.prev for name, entry in run.iterations.items()}):
        kept[head] = "the head of a chain"
        for name in run.chain(head)[-rule.last :] if rule.last else []:
            kept.setdefault(name, f"among the last {rule.last}")
    if rule.every:
        for name in run.iterations:
            if name.isdecimal() and int(name) % rule.every == 0:
                kept.setdefault(name, f"a multiple of {rule.every}")
    if rule.best:
        for name in best(root, run, rule.metric, rule.best):
            kept.setdefault(name, f"among the {rule.best} best by {rule.metric}")
    return kept


def best(root: Path, run: Run, metric: str, count: int) -> list[str]:
    """Return the iterations with the highest metric, best first, whatever chain they are on.

    Raises:
        RlhfError: If no iteration has the metric. ArtifactError: If a file of metrics is damaged.
    """
    finished = [n for n in run.iterations if all((root / f"data/metrics/{s}/{n}.json").is_file() for s in STAGES)]
    values = {name: value for name in finished if (value := read_row(root, name).get(metric)) is not None}
    if not values:
        raise RlhfError(f"no iteration has a metric {metric}; look at `dvc metrics show`, and give --metric another")
    return sorted(values, key=lambda name: values[name], reverse=True)[:count]


def candidates(
    lock: Lock,
    others: Sequence[Revision],
    parts: Sequence[str],
    *,
    names: Collection[str],
    paths: Collection[str],
    objects: bool,
) -> list[Candidate]:
    """Return the checkpoints that go: those that dvc.lock knows and nothing keeps.

    Args:
        lock: Of the project as it is.
        others: Other revisions of it; what they alone refer to stays.
        parts: Some of PARTS.
        names: Iterations that stay.
        paths: Checkpoints that stay.
        objects: Whether their objects in the cache go too.
    """
    chosen = [
        out
        for out in lock.outs.values()
        if _is_checkpoint(out.path, parts) and Path(out.path).name not in names and out.path not in paths
    ]
    used = _used(lock, others, {(out.path, out.md5) for out in chosen})
    found = []
    for out in chosen:
        # The list of a directory's files stays: it is small, and `dvc pull` and `rlhf verify` read it.
        own = set((lock.files(out.md5) or {}).values()) - used
        files = sorted(path for path in map(lock.object, own) if objects and path.is_file())
        if (lock.root / out.path).exists() or files:
            found.append(Candidate(out, _bytes(lock.root / out.path, files), tuple(files)))
        used |= own  # what two of them share is counted once
    return found


def needed_paths(root: Path, lock: Lock) -> dict[str, str]:
    """Return path -> the stage that needs it, for every input of a stage that is not up to date.

    A stage is up to date when dvc.lock has it and `dvc status` says of it nothing but that files are missing: pruned
    ones are. What depends on one that is not, is not.

    Raises:
        RlhfError: If DVC cannot tell, for instance because a stage runs now.
    """
    graph = _graph(root)
    stale = {name for name in graph if name not in lock.stages} | _changed(root)
    more = stale
    while more:
        made = {path for name in stale & graph.keys() for path in graph[name][1]}
        more = {name for name, (deps, _) in graph.items() if made & set(deps)} - stale
        stale |= more
    return {path: name for name in sorted(stale & graph.keys()) for path in graph[name][0]}


def drop(root: Path, chosen: Sequence[Candidate]) -> None:
    """Delete them. An interruption leaves nothing half and nothing unexplained; the same rule then drops the rest.

    Raises:
        DiskError: If the file system refuses.
    """
    remember_pruned(root, [candidate.out for candidate in chosen])
    aside = root / work_root("prune") / "dropped"
    try:
        for candidate in chosen:
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(parents=True, exist_ok=True)
            if (root / candidate.out.path).exists():
                os.replace(root / candidate.out.path, aside)  # half a directory would be a changed one
                shutil.rmtree(aside)
            for path in candidate.objects:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error) or error from None


def _md5(lock: Lock, path: str) -> str | None:
    return lock.outs[path].md5 if path in lock.outs else None


def _is_checkpoint(path: str, parts: Sequence[str]) -> bool:
    pieces = Path(path).parts
    return pieces[:2] == ("data", "checkpoints") and len(pieces) == 4 and pieces[2] in parts


def _bytes(place: Path, objects: Sequence[Path]) -> int:
    stats = [path.stat() for path in objects]
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}
    for path in place.rglob("*"):
        stat = path.lstat()
        if path.is_file() and not path.is_symlink() and stat.st_nlink == 1:
            sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def _used(lock: Lock, others: Sequence[Revision], dropped: Collection[tuple[str, str]]) -> set[str]:
    """MD5 of every object that an output refers to which is not dropped, now or in another revision."""
    outs = {(out.path, out.md5) for out in lock.outs.values()}.union(*(one.files for one in others))
    directories = {md5 for _, md5 in outs - set(dropped)}
    return directories.union(*((lock.files(md5) or {}).values() for md5 in directories))


def _changed(root: Path) -> set[str]:
    """Stages of which `dvc status` says more than that something is missing."""
    stages: Mapping[str, list[str | dict[str, str | dict[str, str]]]] = json.loads(_dvc(root, "status", "--json"))
    changed = set()
    for name, entries in stages.items():
        for entry in entries:
            for states in entry.values() if isinstance(entry, dict) else [entry]:
                # Either path -> state, or a word: the command changed.
                missing = isinstance(states, dict) and all(_is_missing(root, path) for path in states)
                if not missing:
                    changed.add(name)
    return changed


def _is_missing(root: Path, path: str) -> bool:
    return not (root / path).exists()


def _graph(root: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Stage -> (inputs, outputs), as dvc.yaml and iterations.yaml have them now."""
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        return {
            stage.addressing: ([dep.def_path for dep in stage.deps], [out.def_path for out in stage.outs])
            for stage in repo.index.stages
        }


def _dvc(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RlhfError(
            f"`dvc {' '.join(arguments)}` failed, so what may be dropped is not known: {done.stderr.strip()}"
        )
    return done.stdout
