"""Text from models and data steers nothing: no terminal, no browser, no path, no code.

Mutations that must fail here: names of columns, errors or log lines printed as they are; autoescape of the page off;
the page's content security policy left out; trust_remote_code left to a question at the terminal; the index of a
model's shards believed.
"""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config import load_run
from rlhf_core.errors import ModelError
from rlhf_core.report.html import render
from rlhf_core.report.metrics import read_history
from tests import fake_run
from tests.bomb import bomb
from tests.browser import opened
from tests.command import rlhf
from tests.unit.test_html import Page

ROOT = Path(__file__).parents[2]
# Clears the screen; a link; writes the clipboard; returns to the line's start; deletes; reorders; ends a C string.
STEERS = "\x1b[2J\x1b]8;;http://evil\x07a\x1b]8;;\x07\x1b]52;c;ZXZpbA==\x07b\rc\x08\x7f\x9b31m\u202ed\u2066\x00\u2028"
FILE_NAME = STEERS.replace("\x00", "").replace("/", "")
CONTROLS = set("\x00\x07\x08\x0b\x0c\r\x1b\x7f\x9b\u202e\u2066\u2028")
# Ways to run a script from text: an element, a handler, a link, an attribute or element that is left early.
SCRIPTS = (
    "<script>document.title='RAN'</script>",
    "<img src=x onerror=\"document.title='RAN'\">",
    "\"'><svg onload=document.title='RAN'>",
    "</td></pre></title></style><iframe srcdoc=\"<script>parent.document.title='RAN'</script>\"></iframe>",
    "{{ self.__init__.__globals__ }}{% include '/etc/passwd' %}",
    "<a href=javascript:document.title='RAN'>x</a><meta http-equiv=refresh content=0;url=http://evil>",
)


# --- terminal -----------------------------------------------------------------------------------------------------


def inert(text: str) -> bool:
    return not CONTROLS & set(text)


@pytest.fixture(scope="module")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file with escapes in values, in lists, in the names of a column and of its directory."""
    directory = tmp_path_factory.mktemp("rows") / f"iteration={FILE_NAME}"
    directory.mkdir()
    row = {"sample_id": STEERS, "prompt": STEERS, "response": STEERS, "responses": [STEERS, STEERS], STEERS: STEERS}
    path = directory / "part-00000.parquet"
    pq.write_table(pa.table({name: [value] for name, value in row.items()}), path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--json"],
        ["--columns", f"sample_id,iteration,responses,{STEERS}"],
        ["--columns", "absent"],
        ["--where", f"response > '{STEERS[0]}'"],
        ["--tokens"],
        ["--sample-id", STEERS],
    ],
    ids=["records", "json", "table", "absent column", "filter", "no tokens", "nothing found"],
)
def test_inspect_writes_control_characters_out(hostile_file: Path, options: list[str]) -> None:
    found = rlhf("inspect", str(hostile_file), *options, root=ROOT)
    assert found.stdout or found.stderr
    assert inert(found.stdout) and inert(found.stderr)


def test_a_broken_file_with_a_hostile_name_is_named_without_its_escapes(tmp_path: Path) -> None:
    path = tmp_path / f"{FILE_NAME}.parquet"
    path.write_bytes(b"no parquet")
    found = rlhf("inspect", str(path), root=ROOT)
    assert r"\x1b[2J" in found.stderr and inert(found.stderr)
    assert found.returncode == 1


def test_what_a_stage_logs_and_says_cannot_steer_the_terminal(tmp_path: Path) -> None:
    code = f"""
import logging
from rlhf_core.errors import DataError
from rlhf_core.stage import run_stage
text = {STEERS!r}
def main():
    logging.getLogger("rlhf").info("row %s", text)
    logging.getLogger("other").warning(text)
    raise DataError("bad row " + text + "\\nsecond line")
run_stage("x@1", main)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    said = run.stderr.decode()
    assert said.count(r"\x1b[2J") == 3 and "\nsecond line" in said
    assert inert(said)
    assert run.returncode == 1


def test_summary_and_iteration_table_show_no_hostile_metric_names(tmp_path: Path) -> None:
    root = fake_run.build(tmp_path, prompts=3, samples=1, overrides={"score/1": {STEERS: 1.0}})
    found = rlhf("summary", root=root)
    assert inert(found.stdout) and inert(found.stderr)


# --- the report ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run whose every text and name is an attack."""
    patch = pytest.MonkeyPatch()
    attack = "".join(SCRIPTS)
    patch.setattr(fake_run, "NASTY", attack)
    patch.setattr(fake_run, "TOPICS", [*SCRIPTS, attack])
    patch.setattr(fake_run, "GOOD", list(SCRIPTS[:3]))
    patch.setattr(fake_run, "BAD", list(SCRIPTS[3:]))
    names = dict.fromkeys(SCRIPTS, 1.0)
    root = fake_run.build(
        tmp_path_factory.mktemp("run"), prompts=8, samples=2, overrides={"score/1": names, "train_rm": names}
    )
    patch.undo()
    history = read_history(load_run(root), root)
    for evaluation in history.evaluations.values():
        evaluation.metadata.update({attack: attack, "policy": attack, "inputs": {attack: attack}})
    return render(history)


def test_the_report_holds_no_script_no_handler_and_no_address(hostile_page: str) -> None:
    found = Page(hostile_page)
    assert "document.title='RAN'" in found.text  # it is all there, as text
    assert not {"script", "iframe", "img", "object", "embed", "form", "link", "base", "a"} & {
        tag for tag, attributes in found.elements if not (attributes.get("href") or "").startswith("#")
    }
    for _, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("srcdoc", "formaction")]
        for name in ("href", "xlink:href", "src", "action", "style", "content"):
            assert "javascript:" not in (attributes.get(name) or "") and "evil" not in (attributes.get(name) or "")
    assert [attributes["http-equiv"] for _, attributes in found.elements if "http-equiv" in attributes] == [
        "Content-Security-Policy"
    ]


def test_no_script_of_the_data_runs_in_a_browser(hostile_page: str, tmp_path: Path) -> None:
    """Escaping holds without the policy, the policy holds without escaping; and the attack works without both."""
    start = hostile_page.index("<meta http-equiv")
    policy = hostile_page[start : hostile_page.index(">", start) + 1]
    attack = hostile_page.replace("</body>", SCRIPTS[0] + SCRIPTS[1] + "</body>")
    pages = {
        "escaped": hostile_page.replace(policy, ""),
        "policy": attack,
        "neither": attack.replace(policy, ""),
    }
    title = hostile_page.partition("<title>")[2].partition("</title>")[0]
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        shown = opened(tmp_path / f"{name}.html", tmp_path / "profile")
        assert ("<title>RAN</title>" in shown, f"<title>{title}</title>" in shown) == (
            name == "neither",
            name != "neither",
        )


# --- models -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, tiny_dir: Path) -> Path:
    return shutil.copytree(tiny_dir, tmp_path / "model")


def loads(directory: Path) -> list[tuple[str, object]]:
    """Every way in which a model directory is read, and its name."""
    import torch

    from rlhf_core.models import loading

    options = {"device": torch.device("cpu"), "precision": "float32"}
    return [
        ("policy", lambda: loading.load_causal_lm(directory, **options)),
        ("critic", lambda: loading.load_backbone(directory, **options)),
        ("reward model", lambda: loading.load_classifier(directory, **options)),
        ("new reward model", lambda: loading.new_classifier(directory, **options, seed=0)),
        ("base model", lambda: loading.fetch_base_model(str(directory), revision=None, trust_remote_code=False)),
    ]


def refused(directory: Path, words: str) -> None:
    for _, load in loads(directory):
        with pytest.raises(ModelError, match=words):
            load()  # type: ignore[operator]


def test_pickled_weights_are_refused_by_every_loader_and_never_run(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(bomb(tmp_path / "MARK"))
    refused(model, r"pickled weights \(pytorch_model\.bin\) are refused, because they can run code")
    assert not (tmp_path / "MARK").exists()


@pytest.mark.parametrize("name", ["pytorch_model-1.bin", "../other/model.safetensors", "/model.safetensors"])
def test_an_index_that_names_a_pickle_or_a_file_elsewhere_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(model, tmp_path / "other")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model-1.bin").write_bytes(bomb(tmp_path / "MARK"))
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(model, r"index\.json: names .*; expected safetensors files beside it")
    assert not (tmp_path / "MARK").exists()


def test_an_adapter_that_names_a_base_model_elsewhere_is_refused(model: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "/etc", "task_type": "CAUSAL_LM"}
    (model / "adapter_config.json").write_text(json.dumps(adapter))
    refused(model, r"holds an adapter \(adapter_config\.json\), not a whole model; merge it")


def test_code_of_a_model_is_not_run_and_nobody_is_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> str:
        pytest.fail("asked whether to run the model's code")

    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "code.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", asked)
    for _, load in loads(model):
        with pytest.raises(ModelError, match=r"trust_remote_code|custom code|unheard_of"):
            load()  # type: ignore[operator]
    assert not (tmp_path / "MARK").exists()


def test_loggers_of_libraries_are_inert_too() -> None:
    from rlhf_core.stage import _Inert

    record = logging.LogRecord("x", logging.INFO, "", 0, "a%s", ("\x1b[2J",), None)
    assert _Inert("%(message)s").format(record) == r"a\x1b[2J"
