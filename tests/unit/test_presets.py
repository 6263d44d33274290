"""Presets: what they write, what they leave, what they refuse, and the data that they name.

Mutations that must fail here: validate after writing; lose a comment; merge the names of reward sources; a pair of the
sums on both sides.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from data.make_sums import prompt_rows
from rlhf_core.artifacts.schema import PROMPTS
from rlhf_core.artifacts.shards import read_table
from rlhf_core.config import load_run, read_yaml
from rlhf_core.errors import ConfigError
from rlhf_core.presets import apply_preset, presets
from rlhf_core.reward.answers import last_number, last_number_score
from stages import ingest
from tests import command
from tests.tiny import tiny_tokenizer

PROJECT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (PROJECT / "presets").glob("*.yaml"))
SMALL = '# One key.\nparams:\n  advantages: {estimator: rloo}\niterations:\n  "1": '
SMALL += '{prev: "0", rollout: {}, score: {}, advantages: {}, ppo_update: {}}\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration files and the presets, in the current directory."""
    for name in ("params.yaml", "iterations.yaml"):
        shutil.copy(PROJECT / name, tmp_path / name)
    shutil.copytree(PROJECT / "presets", tmp_path / "presets")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(project: Path) -> list[str]:
    return [(project / name).read_text() for name in ("params.yaml", "iterations.yaml")]


def rlhf(*arguments: str) -> tuple[int, str, str]:
    done = command.rlhf(*arguments, root=Path())
    return done.returncode, done.stdout, done.stderr


# --- writing ------------------------------------------------------------------------------------------------------


def test_only_the_lines_of_the_preset_change(project: Path) -> None:
    (project / "presets/small.yaml").write_text(SMALL)
    params, iterations = content(project)
    assert apply_preset(project, "small") == [("advantages.estimator", "gae", "rloo"), ("iterations", "1, 2", "1")]
    after = content(project)
    changed = [pair for pair in zip(params.split("\n"), after[0].split("\n"), strict=True) if pair[0] != pair[1]]
    assert [(old[:17], new[:18]) for old, new in changed] == [("  estimator: gae ", "  estimator: rloo ")]
    assert after[1] == "".join(line for line in iterations.splitlines(keepends=True) if '"2"' not in line)


@pytest.mark.parametrize("name", NAMES)
def test_preset_is_valid_and_keeps_comments(project: Path, name: str) -> None:
    comments = [re.findall(r"#.*", text) for text in content(project)]
    apply_preset(project, name)
    run = load_run(project)
    preset = read_yaml(project / f"presets/{name}.yaml")
    assert list(run.iterations) == list(preset["iterations"])
    written = read_yaml(project / "params.yaml")
    for section, keys in preset["params"].items():
        assert {key: written[section][key] for key in keys} == keys
    # The comments of reward sources go with them; all others stay.
    kept = [re.findall(r"#.*", text) for text in content(project)]
    gone = [one.split(":")[0].split(";")[0] for one in comments[0] if one not in kept[0]]
    assert gone == ["# path", "# what the demo wants"]
    assert kept[1] == comments[1]


@pytest.mark.parametrize("name", NAMES)
def test_second_time_changes_nothing(project: Path, name: str) -> None:
    assert apply_preset(project, name)
    before, times = content(project), [(project / "params.yaml").stat().st_mtime_ns]
    assert apply_preset(project, name) == []
    assert content(project) == before
    assert [(project / "params.yaml").stat().st_mtime_ns] == times


def test_every_preset_sets_the_same_keys_so_that_one_may_follow_another() -> None:
    keys = [
        {
            (section, key)
            for section, values in read_yaml(PROJECT / f"presets/{name}.yaml")["params"].items()
            for key in values
        }
        for name in NAMES
    ]
    assert all(found == keys[0] for found in keys)


def test_sources_of_the_preset_replace_all_others(project: Path) -> None:
    (project / "presets/small.yaml").write_text(
        SMALL.replace("params:", "params:\n  rewards: {short: {kind: repetition, weight: 1.0, ngram: 3}}")
    )
    changes = apply_preset(project, "small")
    assert changes[0] == (
        "rewards",
        "{reward_model: {kind: reward_model, weight: 1.0, path: null}}",
        "{short: {kind: repetition, weight: 1.0, ngram: 3}}",
    )
    assert list(load_run(project).params.rewards) == ["short"]


# --- refusing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            SMALL.replace("estimator: rloo", "estimater: rloo"),
            "params.advantages.estimater: params.yaml has no such key",
        ),
        (SMALL.replace("estimator: rloo", "estimater: rloo"), "(did you mean estimator?)"),
        (SMALL.replace("rloo", "rlo"), "presets/small.yaml does not fit this project, so nothing was changed:\n"),
        (SMALL.replace("rloo", "rlo"), "params.yaml: advantages.estimator is 'rlo'"),
        (SMALL.replace('prev: "0"', 'prev: "7"'), "iterations.yaml: iteration '1': prev is '7'"),
        (SMALL.replace("iterations:", "iteration:"), "presets/small.yaml: expected two maps, params and iterations"),
        (SMALL.replace("rloo}", "rloo"), "small.yaml: not valid YAML"),
        (SMALL.replace("{estimator: rloo}", "3"), "advantages"),
    ],
)
def test_malformed_preset_changes_nothing(project: Path, text: str, words: str) -> None:
    (project / "presets/small.yaml").write_text(text)
    before = content(project)
    with pytest.raises(ConfigError, match=re.escape(words)):
        apply_preset(project, "small")
    assert content(project) == before


# --- the command --------------------------------------------------------------------------------------------------


def test_command_lists_the_presets_with_their_first_line(project: Path) -> None:
    (project / "presets/bare.yaml").write_text("params: {}\n")
    code, out, _ = rlhf("preset")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["bare", *NAMES]
    assert "sums  Sums of one and two digits" in out
    assert all(presets(PROJECT).values())


def test_command_shows_what_it_changed_and_how_to_go_back(project: Path) -> None:
    code, out, _ = rlhf("preset", "sums")
    assert code == 0
    assert "ingest.preferences: data/raw/preferences.jsonl -> null\n" in out
    assert out.endswith("next: dvc repro; back to what git holds: git checkout params.yaml iterations.yaml\n")
    assert rlhf("preset", "sums")[1].startswith("params.yaml and iterations.yaml hold preset sums already\n")


def test_command_names_the_nearest_preset(project: Path) -> None:
    code, _, err = rlhf("preset", "sum")
    assert code == 1
    assert err == f"ConfigError: no preset 'sum' (did you mean sums?); presets/ has {', '.join(NAMES)}\n"


# --- their data ---------------------------------------------------------------------------------------------------


def test_file_of_sums_is_what_its_generator_makes() -> None:
    assert (PROJECT / "data/raw/sums.jsonl").read_text() == "".join(json.dumps(row) + "\n" for row in prompt_rows())


def test_no_held_out_pair_is_in_the_training_prompts_either_way_round() -> None:
    pairs: dict[str, set[tuple[int, ...]]] = {"train": set(), "eval": set()}
    for row in prompt_rows():
        numbers = [int(number) for number in re.findall(r"\d+", row["prompt"][-1]["content"])]
        assert sum(numbers) == row["ground_truth"] and len(numbers) == 2
        pairs[row["split"]].add(tuple(sorted(numbers)))
    assert not pairs["train"] & pairs["eval"]
    for side in pairs.values():
        assert any(max(pair) < 10 for pair in side) and any(min(pair) >= 10 for pair in side)
    assert all(max(pair) < 10 or min(pair) >= 10 for side in pairs.values() for pair in side)


def test_gsm8k_as_published(real_data: Path, project: Path) -> None:
    """Every question is read, on the side that its file says, and every reference answer is right by the rule."""
    shutil.copytree(real_data / "gsm8k", project / "data/raw/gsm8k", ignore=shutil.ignore_patterns("LICENSE"))
    tiny_tokenizer().save_pretrained("data/checkpoints/policy/0")
    apply_preset(project, "gsm8k")
    # The tiny tokenizer has about one token a character.
    params = (project / "params.yaml").read_text()
    params = params.replace("max_prompt_tokens: 512", "max_prompt_tokens: 4000")
    (project / "params.yaml").write_text(params.replace("max_model_len: 1024", "max_model_len: 5000"))
    ingest.main()
    metrics = json.loads(Path("data/metrics/ingest.json").read_text())
    assert {key: value for key, value in metrics.items() if value} == {"prompts/train": 7473, "prompts/eval": 1319}
    table = read_table(Path("data/prompts"))
    assert table.schema.equals(PROMPTS)
    prompts = table.to_pylist()
    assert all(row["source"].startswith("data/raw/gsm8k/") for row in prompts)
    assert all((row["split"] == "eval") == row["source"].endswith("test.jsonl") for row in prompts)
    assert prompts[0]["messages"][0]["content"].endswith("end with the answer as a number.")
    finals: dict[str, list[str]] = {"train": [], "eval": []}
    for row in prompts:
        reference = json.loads(row["ground_truth"])
        final = reference.rpartition("#### ")[2]
        value = float(final.replace(",", ""))
        finals[row["split"]].append(final)
        assert last_number(reference) == value
        assert last_number_score(f"The answer is {final}.", reference, partial_credit=0.0) == 1.0
        assert last_number_score(str(value + 1), reference, partial_credit=0.0) == 0.0
    # Counted in the files: thousands commas, and negative numbers.
    assert [sum("," in final for final in finals[side]) for side in ("train", "eval")] == [79, 14]
    assert [sum(final.startswith("-") for final in finals[side]) for side in ("train", "eval")] == [3, 2]
