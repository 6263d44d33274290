"""`rlhf prune`: which checkpoints stay, what is counted, what of the cache goes. pipeline/test_files.py runs dvc."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_core.cli import app, append_iterations
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.report import prune
from rlhf_core.report.doctor import pruned_check
from rlhf_core.report.dvc_lock import directory_md5, read_lock
from rlhf_core.report.prune import Rule, drop, kept_iterations, plan
from rlhf_core.report.pruned import PRUNED, read_pruned, remember_pruned

PROJECT = Path(__file__).parents[2]
PARTS = ("policy", "critic", "optimizer")
SIZES = {"policy": 1000, "critic": 100, "optimizer": 2000}
SHARED = b"tokenizer" * 10  # 90 bytes, the same in every policy


@pytest.fixture(autouse=True)
def up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """dvc would say that no stage has to run."""
    monkeypatch.setattr(prune, "needed_paths", lambda root, lock: {})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Iterations 1 to 5, and 3b which starts from 2; every checkpoint linked to the cache."""
    previous = {"1": "0", "2": "1", "3": "2", "4": "3", "5": "4", "3b": "2"}
    return build(tmp_path / "project", previous, link=os.link)


def build(root: Path, previous: dict[str, str], *, link) -> Path:
    root.mkdir()
    sections = "rollout: {}, score: {}, advantages: {}, ppo_update: {}"
    lines = [f'  "{name}": {{prev: "{prev}", {sections}}}\n' for name, prev in previous.items()]
    (root / "iterations.yaml").write_text("iterations:\n" + "".join(lines))
    shutil.copy(PROJECT / "params.yaml", root)
    stages = {
        f"ppo_update@{name}": {"outs": [checkpoint(root, kind, name, link) for kind in PARTS]} for name in previous
    }
    stages["base_model"] = {"outs": [checkpoint(root, kind, "0", link) for kind in PARTS]}
    write_lock(root, stages)
    return root


def write_lock(root: Path, stages: dict[str, dict[str, list[dict[str, object]]]]) -> None:
    text = "schema: '2.0'\nstages:\n"
    for name, stage in stages.items():
        text += f"  {name}:\n    outs:\n"
        for out in stage["outs"]:
            text += f"    - path: {out['path']}\n      hash: md5\n      md5: {out['md5']}\n      size: {out['size']}\n"
    (root / "dvc.lock").write_text(text)


def checkpoint(root: Path, kind: str, name: str, link) -> dict[str, object]:
    """One directory with its objects in the cache, as dvc.lock describes it."""
    files = {"model.safetensors": f"{kind}/{name} ".encode().ljust(SIZES[kind], b".")}
    if kind == "policy":
        files["tokenizer.json"] = SHARED
    place = root / "data/checkpoints" / kind / name
    place.mkdir(parents=True)
    digests = {}
    for file, content in files.items():
        digests[file] = hashlib.md5(content).hexdigest()
        store(root, digests[file], content)
        link(object_of(root, digests[file]).resolve(), place / file)
    whole = directory_md5(digests)
    store(root, whole, json.dumps([{"md5": md5, "relpath": file} for file, md5 in digests.items()]).encode())
    size = sum(map(len, files.values()))
    return {"path": place.relative_to(root).as_posix(), "md5": whole, "size": size}


def object_of(root: Path, md5: str) -> Path:
    return root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def store(root: Path, md5: str, content: bytes) -> None:
    object_of(root, md5).parent.mkdir(parents=True, exist_ok=True)
    object_of(root, md5).write_bytes(content)


def objects(root: Path) -> list[Path]:
    return [path for path in (root / ".dvc/cache/files/md5").glob("*/*") if path.suffix != ".dir"]


def rule(last: int | None = None, best: int | None = None, every: int | None = None) -> Rule:
    return Rule(last=last, best=best, every=every, metric="eval/score_mean")


def planned(root: Path, which: Rule, parts: tuple[str, ...] = PARTS, *, outside_cache: bool = False):
    lines: list[str] = []
    return plan(root, which, parts, outside_cache=outside_cache, say=lines.append), lines


def remaining(root: Path, kind: str = "policy") -> list[str]:
    return sorted(path.name for path in (root / "data/checkpoints" / kind).iterdir())


def metrics(root: Path, values: dict[str, float | None]) -> None:
    for name, value in values.items():
        for stage in ("rollout", "score", "advantages", "ppo_update", "evaluate"):
            path = root / f"data/metrics/{stage}/{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"eval/score_mean": value} if stage == "evaluate" else {}))


def test_every_rule_keeps_what_it_says_and_heads_stay(project: Path) -> None:
    assert set(kept_iterations(project, rule(last=1))) == {"0", "5", "3b"}
    assert set(kept_iterations(project, rule(last=2))) == {"0", "4", "5", "2", "3b"}  # of both chains
    assert set(kept_iterations(project, rule(every=2))) == {"0", "2", "4", "5", "3b"}
    metrics(project, {"1": 0.1, "2": 0.9, "3": 0.5, "4": None})  # 4 has none that is defined, 5 has not run
    assert set(kept_iterations(project, rule(best=1))) == {"0", "2", "5", "3b"}
    assert set(kept_iterations(project, rule(best=2, every=4))) == {"0", "2", "3", "4", "5", "3b"}


def test_a_damaged_metric_stops_instead_of_dropping_the_best(project: Path) -> None:
    metrics(project, {"1": 0.1, "2": 0.9})
    (project / "data/metrics/evaluate/2.json").write_text('{"eval/score_mean"')
    with pytest.raises(RlhfError, match=r"evaluate/2\.json"):
        kept_iterations(project, rule(best=1))


def test_what_is_asked_has_to_make_sense(project: Path) -> None:
    with pytest.raises(ConfigError, match="say which checkpoints to keep: --keep-last N"):
        kept_iterations(project, rule())
    with pytest.raises(RlhfError, match="no iteration has a metric eval/score_mean"):
        kept_iterations(project, rule(best=1))
    with pytest.raises(ConfigError, match="--parts optimiser: expected some of policy,critic,optimizer"):
        planned(project, rule(last=1), ("optimiser",))


# (how the workspace holds a file, bytes that dropping one policy, critic and optimizer frees): 1000 + 100 + 2000, twice
# where it is a copy; the tokenizer's 90 bytes only where the workspace has them a second time.
@pytest.mark.parametrize(("link", "freed"), [(os.link, 3100), (shutil.copy, 6290), (os.symlink, 3100)])
def test_bytes_are_those_that_the_disk_gets_back(tmp_path: Path, link, freed: int) -> None:
    root = build(tmp_path / "project", {"1": "0", "2": "1"}, link=link)
    chosen, lines = planned(root, rule(last=1))
    assert sum(candidate.bytes for candidate in chosen) == freed
    assert lines[:2] == ["keep 0: the base model", "keep 2: the head of a chain"]
    assert lines[2].startswith("drop 1: policy ") and f"1 iterations, {freed} bytes to free; " in lines[-1]
    blocks = {(stat.st_dev, stat.st_ino): stat.st_size for stat in (p.stat() for p in root.rglob("*") if p.is_file())}
    drop(root, chosen)
    left = {(stat.st_dev, stat.st_ino): stat.st_size for stat in (p.stat() for p in root.rglob("*") if p.is_file())}
    own = (root / PRUNED).stat().st_size
    assert sum(blocks.values()) - sum(left.values()) == freed - own


def test_dropping_leaves_what_others_share_and_is_noted(project: Path) -> None:
    chosen, _ = planned(project, rule(last=1))
    before = len(objects(project))
    drop(project, chosen)
    assert [remaining(project, kind) for kind in PARTS] == [["0", "3b", "5"]] * 3
    assert before - len(objects(project)) == 4 * 3  # 1 to 4, three weights each; the tokenizer is in the others
    assert (project / "data/checkpoints/policy/5/tokenizer.json").read_bytes() == SHARED
    gone = read_pruned(project)
    assert set(gone) == {f"data/checkpoints/{kind}/{name}" for kind in PARTS for name in "1234"}
    assert gone["data/checkpoints/policy/1"] == read_lock(project).outs["data/checkpoints/policy/1"].md5
    assert planned(project, rule(last=1))[0] == []  # a second time there is nothing to do
    check = pruned_check(project)
    assert check.status == "warning" and "dropped 12 directories" in check.text
    with pytest.raises(RlhfError, match=r"iteration 3: .*policy/3.*`dvc pull data.*`dvc repro ppo_update@3` makes it"):
        append_iterations(project, 1, "3")


def test_only_the_optimizer_goes_where_only_it_is_named(project: Path) -> None:
    drop(project, planned(project, rule(last=1), ("optimizer",))[0])
    assert remaining(project, "optimizer") == ["0", "3b", "5"] and len(remaining(project, "policy")) == 7


def test_an_interruption_leaves_whole_directories_and_the_same_rule_goes_on(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, _ = planned(project, rule(last=1))
    unlink, calls = Path.unlink, []

    def killed(self: Path, missing_ok: bool = False) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        drop(project, chosen)
    monkeypatch.setattr(Path, "unlink", unlink)
    for path in (project / "data/checkpoints").glob("*/*"):
        assert (path / "model.safetensors").is_file()
    drop(project, planned(project, rule(last=1))[0])
    assert remaining(project) == ["0", "3b", "5"] and len(objects(project)) == 3 * 3 + 1


def test_a_cache_outside_the_project_is_left_unless_told(tmp_path: Path) -> None:
    root = build(tmp_path / "project", {"1": "0", "2": "1"}, link=os.link)
    (root / ".dvc/cache").rename(tmp_path / "shared")
    (root / ".dvc/config").write_text(f"[cache]\n    dir = {tmp_path / 'shared'}\n")
    chosen, lines = planned(root, rule(last=1))
    assert [candidate.bytes for candidate in chosen] == [0, 0, 0] and all(not one.objects for one in chosen)
    assert any("outside this project, so what it holds stays; --outside-cache" in line for line in lines)
    assert sum(one.bytes for one in planned(root, rule(last=1), outside_cache=True)[0]) == 3100


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def test_what_a_tag_or_another_branch_ends_with_stays(tmp_path: Path) -> None:
    # One commit an iteration: 1 is tagged, 3 is where another branch made its own 4, and this one went on to 5.
    root = tmp_path / "project"
    git(tmp_path, "init", "--quiet", "-b", "main", str(root))
    shutil.move(build(tmp_path / "made", {"1": "0"}, link=os.link), tmp_path / "x")
    shutil.copytree(tmp_path / "x", root, dirs_exist_ok=True)
    git(root, "add", "iterations.yaml", "dvc.lock")
    git(root, "commit", "-qm", "1")
    git(root, "tag", "-a", "v1", "-m", "v1")
    for count in (3, 5):
        new = build(tmp_path / f"made{count}", {str(n): str(n - 1) for n in range(1, count + 1)}, link=os.link)
        for name in ("iterations.yaml", "dvc.lock"):
            shutil.copy(new / name, root / name)
        git(root, "commit", "-qam", str(count))
        if count == 3:
            git(root, "checkout", "-qb", "other")
            text = (root / "dvc.lock").read_text().replace("data/checkpoints/policy/3", "data/checkpoints/policy/3x")
            (root / "dvc.lock").write_text(text)
            git(root, "commit", "-qam", "other")
            git(root, "checkout", "-q", "main")
    shutil.rmtree(root / "data")
    shutil.rmtree(root / ".dvc")
    shutil.copytree(tmp_path / "made5/data", root / "data")
    shutil.copytree(tmp_path / "made5/.dvc", root / ".dvc")
    chosen, lines = planned(root, rule(last=1))
    assert "keep data/checkpoints/policy/1: the last of tag v1" in lines
    assert "keep data/checkpoints/critic/3: the last of other" in lines  # its own policy is another, under another name
    dropped = [candidate.out.path for candidate in chosen]
    assert sorted(dropped) == sorted(
        [*(f"data/checkpoints/{kind}/{name}" for kind in PARTS for name in "24"), "data/checkpoints/policy/3"]
    )
    # The branch's 3x has the bytes of policy/3, which it alone still refers to.
    (policy,) = [candidate for candidate in chosen if candidate.out.path == "data/checkpoints/policy/3"]
    assert policy.objects == ()


def test_the_command_asks_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    done = CliRunner().invoke(app, ["prune", "--keep-last", "1"], input="n\n")
    assert done.exit_code == 0 and "4 iterations, 12.1 KiB to free" in done.output and len(remaining(project)) == 7
    assert CliRunner().invoke(app, ["prune", "--keep-last", "1"], input="").exit_code == 1  # nobody there to answer
    assert len(remaining(project)) == 7
    done = CliRunner().invoke(app, ["prune", "--keep-last", "1", "--yes"])
    assert "commit data/pruned.json" in done.output and len(remaining(project)) == 3


def test_a_damaged_note_is_named(project: Path) -> None:
    (project / PRUNED).write_text('{"data/checkpoints/policy/1": 3}')
    for act in (lambda: read_pruned(project), lambda: remember_pruned(project, [])):
        with pytest.raises(RlhfError, match=r"data/pruned\.json: damaged .*take it from git"):
            act()
    assert pruned_check(project).status == "error"
