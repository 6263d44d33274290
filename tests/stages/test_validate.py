"""The validate stage: a constant when all is well; otherwise every problem, and nothing written.

Mutations that must fail here: the time written into config.ok; the first problem raised alone; hub: sources looked for
on disk.
"""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_core.config import Params, load_run
from rlhf_core.errors import ConfigError
from stages import validate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the shipped parameters and empty data files."""
    for name in ("params.yaml", "iterations.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    params = load_run(ROOT).params.ingest
    for source in (params.prompts, params.preferences):
        if source is not None:
            (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / source).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changed(**sections: dict[str, object]) -> Params:
    """The shipped parameters with some values replaced."""
    params = load_run(ROOT).params
    parts = {name: getattr(params, name).model_copy(update=values) for name, values in sections.items()}
    return params.model_copy(update=parts)


def test_out_is_the_same_whatever_the_parameters(project: Path) -> None:
    validate.main()
    first = (project / "data/.checks/config.ok").read_bytes()
    text = (project / "params.yaml").read_text(encoding="utf-8")
    (project / "params.yaml").write_text(text.replace("seed: 0", "seed: 1"), encoding="utf-8")
    validate.main()
    assert (project / "data/.checks/config.ok").read_bytes() == first


def test_bad_value_stops_and_keeps_the_old_out(project: Path) -> None:
    validate.main()
    text = (project / "params.yaml").read_text(encoding="utf-8")
    (project / "params.yaml").write_text(text.replace("seed: 0", "seed: -1"), encoding="utf-8")
    with pytest.raises(ConfigError, match="seed"):
        validate.main()
    assert (project / "data/.checks/config.ok").exists()


@pytest.mark.parametrize("where", ["params.yaml", "iterations.yaml"])
def test_an_optional_package_is_asked_for_before_any_stage_needs_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    yaml = YAML()
    content = yaml.load(project / where)
    groups = content if where == "params.yaml" else content["iterations"]["2"]
    groups.setdefault("ppo_update", {})["optimizer"] = "adamw_8bit"
    yaml.dump(content, project / where)
    monkeypatch.setattr(validate.importlib.util, "find_spec", lambda name: None if name == "torchao" else 1)
    with pytest.raises(ConfigError, match=r"adamw_8bit, which needs torchao.*pip install.*or set it to adamw"):
        validate.main()
    monkeypatch.setattr(validate.importlib.util, "find_spec", lambda name: 1)
    validate.main()


def test_a_compiler_is_asked_for_before_any_stage_needs_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = YAML()
    content = yaml.load(project / "params.yaml")
    content["compute"]["torch_compile"] = True
    yaml.dump(content, project / "params.yaml")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match=r"torch_compile is true.*there is no no-such-compiler; install one.*to false"
    ):
        validate.main()
    monkeypatch.setattr(validate.shutil, "which", lambda name: f"/usr/bin/{name}")
    validate.main()


def test_all_missing_files_at_once(tmp_path: Path) -> None:
    params = changed(
        ingest={"prompts": "data/raw/no.jsonl", "preferences": "data/raw/none.parquet"},
        base_model={"source": "./no-model"},
        train_rm={"model": "/no/such/model"},
    )
    found = validate.missing_inputs(params, tmp_path)
    assert [line.split(": ")[1].split(" is ")[0] for line in found] == [
        "ingest.prompts",
        "ingest.preferences",
        "base_model.source",
        "train_rm.model",
    ]


def test_sources_elsewhere_are_not_looked_for(tmp_path: Path) -> None:
    params = changed(
        ingest={"prompts": "hub:owner/prompts", "preferences": None},
        base_model={"source": "owner/model"},
        train_rm={"model": "base"},
    )
    assert validate.missing_inputs(params, tmp_path) == []


def test_directory_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    params = changed(ingest={"prompts": "hub:a/b", "preferences": None}, base_model={"source": str(tmp_path / "empty")})
    (line,) = validate.missing_inputs(params, tmp_path)
    assert "config.json" in line
    (tmp_path / "empty/config.json").touch()
    assert validate.missing_inputs(params, tmp_path) == []
