"""The keys of params.yaml, the classes that read them, the params that dvc.yaml lists, and the docs agree."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import ITERATION_SECTIONS, Iteration, Params, read_yaml
from rlhf_core.reward_config import KINDS
from tests.meta.project import ROOT, tree
from tools import update_deps

STAGES: dict[str, dict[str, Any]] = update_deps.stages_of(read_yaml(ROOT / "dvc.yaml"))
SECTIONS = set(Params.model_fields)
SCALARS = {"seed", "conventions"}  # top-level values that are no group


def test_params_yaml_holds_exactly_the_fields() -> None:
    raw = read_yaml(ROOT / "params.yaml")
    assert set(raw) == SECTIONS
    for name, section in raw.items():
        if name == "rewards":
            for source in section.values():
                assert set(source) == set(KINDS[source["kind"]].model_fields)
        elif name not in SCALARS:
            model: Any = Params.model_fields[name].annotation
            assert set(section) == set(model.model_fields), name


def test_every_number_has_a_comment() -> None:
    bare = [
        line
        for line in (ROOT / "params.yaml").read_text(encoding="utf-8").splitlines()
        if re.match(r"\s*\w+: \S", line) and "#" not in line
    ]
    # Names that say it all, or whose group's first line does.
    known = (
        "samples_per_prompt",
        "weight_decay",
        "max_grad_norm",
        "adam_betas",
        "adam_eps",
        "epochs",
        "ppo_epochs",
        "gamma",
        "gae_lambda",
    )
    known += ("clip_range", "value_coef", "entropy_coef")
    assert [line for line in bare if not line.strip().startswith(known)] == []


def test_sections_that_an_iteration_overrides_are_stages() -> None:
    assert set(Iteration.model_fields) == {"prev", *ITERATION_SECTIONS}
    assert set(ITERATION_SECTIONS) <= SECTIONS & set(STAGES)


def reward_keys() -> dict[str, None]:
    """Keys of all kinds of reward sources, each once."""
    return {key: None for source in KINDS.values() for key in source.model_fields}


def sections_read(path: Path) -> set[str]:
    """Sections of params.yaml that a stage file mentions: attributes of anything called params, and of .at(...)."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in SECTIONS and reads_params(node.value):
            found.add(node.attr)
        if isinstance(node, ast.keyword) and node.arg == "include":
            found |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)} & SECTIONS
    return found


def reads_params(node: ast.expr) -> bool:
    """Whether an expression is, by its look, the Params object."""
    if isinstance(node, ast.Name):
        return node.id in ("params", "run", "p")
    if isinstance(node, ast.Attribute):
        return node.attr == "params"
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "at"


@pytest.mark.parametrize("name", [name for name in STAGES if name not in ("validate", "report")])
def test_stage_lists_the_parameters_it_reads(name: str) -> None:
    stage = STAGES[name]
    declared = {entry for entry in stage["params"] if isinstance(entry, str)}
    path = update_deps.stage_file(stage, ROOT).relative_to(ROOT)
    read = sections_read(path)
    assert read == declared, f"{path} reads {sorted(read)}; dvc.yaml lists {sorted(declared)} for {name}"


@pytest.mark.parametrize("name", ITERATION_SECTIONS)
def test_stage_lists_its_overrides_and_only_those(name: str) -> None:
    overrides = [entry for entry in STAGES[name]["params"] if isinstance(entry, dict)]
    assert overrides == [{"iterations.yaml": [f"iterations.${{key}}.{name}"]}]


def test_validate_reads_both_files_whole() -> None:
    assert STAGES["validate"]["params"] == [{"params.yaml": None}]
    assert "iterations.yaml" in STAGES["validate"]["deps"]


def test_parameter_reference_explains_every_key() -> None:
    text = (ROOT / "docs/parameters.md").read_text(encoding="utf-8")
    missing = []
    for name, field in Params.model_fields.items():
        model: Any = field.annotation
        keys = [name] if name in SCALARS else reward_keys() if name == "rewards" else model.model_fields
        missing += [f"{name}.{key}" for key in keys if f"`{key}`" not in text and f"`{name}.{key}`" not in text]
    assert not missing
