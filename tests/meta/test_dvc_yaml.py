"""dvc.yaml says what the code does: dependencies are import closures, commands and outs follow the rules.

The closure itself is tested on a small made-up tree and against what Python really loads.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import read_yaml
from tests.meta.project import ROOT
from tools import update_deps

STAGES: dict[str, dict[str, Any]] = update_deps.stages_of(read_yaml(ROOT / "dvc.yaml"))


@pytest.mark.parametrize("name", STAGES)
def test_code_dependencies_are_the_import_closure(name: str) -> None:
    stage = STAGES[name]
    declared = {dep for dep in stage["deps"] if update_deps.is_code(dep)}
    wanted = set(update_deps.closure(update_deps.stage_file(stage, ROOT), ROOT))
    add, remove = sorted(wanted - declared), sorted(declared - wanted)
    assert not add, f"dvc.yaml, {name}: add {add} to deps (run `make deps`)"
    assert not remove, f"dvc.yaml, {name}: remove {remove} from deps (run `make deps`)"


@pytest.mark.parametrize("name", STAGES)
def test_dependencies_are_listed_once(name: str) -> None:
    deps = STAGES[name]["deps"]
    assert len(set(deps)) == len(deps)


@pytest.mark.parametrize("name", STAGES)
def test_command_replaces_the_shell(name: str) -> None:
    # Without exec a shell stands between dvc and the stage, and the stage outlives a killed dvc. With a pipe (to a log)
    # dvc would see the last command's exit code and take a failed stage for a finished one.
    assert re.fullmatch(r"exec python -m stages\.\w+( 0| \$\{[\w.]+\})*", STAGES[name]["cmd"])


@pytest.mark.parametrize("name", [name for name in STAGES if name not in ("validate", "report")])
def test_nothing_expensive_runs_before_the_check_of_parameters(name: str) -> None:
    assert "data/.checks/config.ok" in STAGES[name]["deps"]


def test_a_person_s_reward_functions_are_seen_by_what_scores_but_not_their_bytecode() -> None:
    seen_by = [name for name, stage in STAGES.items() if "user_rewards" in stage["deps"]]
    assert seen_by == ["score", "evaluate_base", "evaluate"]
    assert "__pycache__/" in (ROOT / ".dvcignore").read_text(encoding="utf-8").splitlines()


def outs(stage: dict[str, Any]) -> list[str]:
    return [next(iter(out)) if isinstance(out, dict) else out for out in stage.get("outs", [])]


def test_outs_are_in_gitignore() -> None:
    # DVC's own .gitignore entries are rolled back when a later stage fails (treeverse/dvc#11091).
    # "/x": the entries end in "/", which matches only what is seen to be a directory.
    paths = [out.replace("${key}", "1") + "/x" for stage in STAGES.values() for out in outs(stage)]
    ignored = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ignored.stdout.split() == paths


def test_outs_are_cached_and_metrics_are_not() -> None:
    # A plain out with cache: false would switch the run cache off for its stage (treeverse/dvc#4428).
    for name, stage in STAGES.items():
        assert all(isinstance(out, str) for out in stage.get("outs", [])), name
        for kind in ("metrics", "plots"):
            for entry in stage.get(kind, []):
                assert all(options["cache"] is False for options in entry.values()), (name, entry)


def test_metrics_and_plots_are_not_ignored_by_git() -> None:
    paths = [
        path.replace("${key}", "1")
        for stage in STAGES.values()
        for kind in ("metrics", "plots")
        for entry in stage.get(kind, [])
        for path in entry
    ]
    found = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.stdout == ""


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    files = {
        "stages/__init__.py": '"""Nothing."""\n',
        "stages/one.py": "import json\nfrom rlhf_core import a\n\n\ndef main():\n    from rlhf_core.sub import late\n",
        "rlhf_core/__init__.py": '"""Only words."""\n',
        "rlhf_core/a.py": 'import numpy\nfrom rlhf_core.b import name\nPAGE = "page.html"\nSELF = "b.py"\nUP = ".."\n',
        "rlhf_core/b.py": "name = 1\n",
        "rlhf_core/page.html": "<p>",
        "rlhf_core/other.html": "<p>",
        "rlhf_core/unused.py": "",
        "rlhf_core/sub/__init__.py": "from rlhf_core.sub.used import x\n",
        "rlhf_core/sub/used.py": "x = 1\n",
        "rlhf_core/sub/late.py": "from . import beside\nfrom ..c import d\n",
        "rlhf_core/sub/beside.py": "",
        "rlhf_core/c.py": "d = 1\nimport rlhf_core.a\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_closure_of_a_made_up_tree(small_tree: Path) -> None:
    assert update_deps.closure(small_tree / "stages/one.py", small_tree) == [
        "rlhf_core/a.py",
        "rlhf_core/b.py",
        "rlhf_core/c.py",
        "rlhf_core/page.html",
        "rlhf_core/sub/__init__.py",
        "rlhf_core/sub/beside.py",
        "rlhf_core/sub/late.py",
        "rlhf_core/sub/used.py",
        "stages/one.py",
    ]


def test_update_changes_only_the_code_dependencies(small_tree: Path) -> None:
    head = "# top\nstages:\n  s:\n    foreach: ${x}\n    do:\n"
    head += "      cmd: exec python -m stages.one ${key}   # why\n      deps:\n"
    tail = '      params: [a, {i.yaml: ["x.${key}"]}]\n      outs:\n        - data/out\n'
    data = "        - data/in\n        - data/checkpoints/${item.prev}\n"
    for stale in ("", "        - rlhf_core/gone.py\n        - stages/one.py\n"):
        found = update_deps.update(head + data + stale + tail, small_tree)
        code = "".join(f"        - {path}\n" for path in update_deps.closure(small_tree / "stages/one.py", small_tree))
        assert found == head + data + code + tail
        assert update_deps.update(found, small_tree) == found


@pytest.mark.parametrize("stage", ["validate", "advantages", "report", "ingest", "train_rm"])
def test_closure_holds_everything_that_python_loads(stage: str) -> None:
    command = (
        f"import sys, json, stages.{stage}\n"
        "print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in ('rlhf_core', 'stages')]))"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {Path(file).relative_to(ROOT).as_posix() for file in json.loads(done.stdout)}
    without_code = {path for path in loaded if path.endswith("__init__.py") and not update_deps.has_code(parse(path))}
    assert loaded - without_code <= set(update_deps.closure(ROOT / f"stages/{stage}.py", ROOT))
    assert f"stages/{stage}.py" in loaded


def parse(path: str) -> Any:
    import ast

    return ast.parse((ROOT / path).read_text(encoding="utf-8"))
