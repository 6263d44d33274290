"""params.yaml and iterations.yaml: what is refused, and in which words.

One-line mutations of rlhf_core/config.py that must fail here: strict=True removed; extra="forbid" removed; a default
added to a field; allow_inf_nan removed; return after the first problem; the cycle check removed; YAML 1.1 read.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import load_yaml
from pydantic import BaseModel

from rlhf_core import config
from rlhf_core.config import Run, load_run, read_yaml
from rlhf_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
PARAMS = (ROOT / "params.yaml").read_text(encoding="utf-8")
TWO = """\
iterations:
  "1": {prev: "0", rollout: {}, score: {}, advantages: {}, ppo_update: {}}
  "2": {prev: "1", rollout: {}, score: {}, advantages: {}, ppo_update: {}}
"""


def with_value(section: str, key: str, value: str, text: str = PARAMS, new_key: str = "") -> str:
    """params.yaml with one value (or key) replaced in its text."""
    before, after = re.split(rf"(?m)^{section}:.*$", text, maxsplit=1)
    changed, count = re.subn(rf"(?m)^  {key}: [^#\n]*", f"  {new_key or key}: {value} ", after, count=1)
    assert count == 1
    return f"{before}{section}:{changed}"


def with_rewards(value: str, text: str = PARAMS) -> str:
    """params.yaml with another group `rewards`."""
    before, rest = text.split("\nrewards:", 1)
    return f"{before}\nrewards: {value}\n\nscore:" + rest.split("\nscore:", 1)[1]


def with_held_out(value: str, text: str = PARAMS) -> str:
    """params.yaml with another map evaluate.rewards, which is its last key."""
    return text.rsplit("\n  rewards:", 1)[0] + f"\n  rewards: {value}\n"


def load(tmp_path: Path, params: str = PARAMS, iterations: str = TWO) -> Run:
    (tmp_path / "params.yaml").write_text(params, encoding="utf-8")
    (tmp_path / "iterations.yaml").write_text(iterations, encoding="utf-8")
    return load_run(tmp_path)


def problems(tmp_path: Path, params: str = PARAMS, iterations: str = TWO) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, params, iterations)
    return str(caught.value).splitlines()


def one_problem(tmp_path: Path, params: str = PARAMS, iterations: str = TWO) -> str:
    found = problems(tmp_path, params, iterations)
    assert len(found) == 1, found
    return found[0]


def test_shipped_files_are_valid_and_say_what_they_hold() -> None:
    run = load_run(ROOT)
    found = run.params.model_dump()
    assert "auto" not in (found["compute"]["precision"], found["sampling"]["dtype"])  # named for this machine
    found["compute"]["precision"] = found["sampling"]["dtype"] = "auto"
    assert found == read_yaml(ROOT / "params.yaml")
    assert list(run.iterations) == list(read_yaml(ROOT / "iterations.yaml")["iterations"])


def test_no_field_has_a_default() -> None:
    def fields(model: type[BaseModel]) -> list[str]:
        return [f"{model.__name__}.{name}" for name, field in model.model_fields.items() if not field.is_required()]

    models = [item for item in vars(config).values() if isinstance(item, type) and issubclass(item, BaseModel)]
    assert [name for model in models for name in fields(model)] == []


def test_misspelt_key_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    found = problems(tmp_path, with_value("ppo_update", "clip_range", "0.2", new_key="clip_rnage"))
    assert "params.yaml: unknown key ppo_update.clip_rnage (did you mean clip_range?)" in found
    assert "params.yaml: missing key ppo_update.clip_range" in found
    assert len(found) == 2


def test_misspelt_section_is_named(tmp_path: Path) -> None:
    found = problems(tmp_path, PARAMS.replace("\nadvantages:", "\nadvantage:"))
    assert "params.yaml: unknown key advantage (did you mean advantages?)" in found
    assert "params.yaml: missing key advantages" in found


def test_misspelt_reward_source_is_named(tmp_path: Path) -> None:
    found = one_problem(tmp_path, with_rewards("{x: {kind: reward_modle, weight: 1.0}}"))
    assert found.startswith("params.yaml: rewards.x.kind is 'reward_modle': expected reward_model, judge,")
    assert found.endswith("(did you mean reward_model?)")


@pytest.mark.parametrize(
    "section, key, value, words",
    [
        ("ppo_update", "ppo_epochs", "2.5", ["ppo_update.ppo_epochs", "2.5", "integer"]),
        ("ppo_update", "ppo_epochs", "true", ["ppo_update.ppo_epochs", "True", "integer"]),
        ("ppo_update", "learning_rate", "fast", ["ppo_update.learning_rate", "'fast'", "number"]),
        ("ppo_update", "learning_rate", '"1e-5"', ["ppo_update.learning_rate", "'1e-5'", "number"]),
        ("advantages", "whiten_advantages", "no", ["advantages.whiten_advantages", "'no'", "boolean"]),
        ("ingest", "prompts", "3", ["ingest.prompts", "3", "string"]),
        ("ppo_update", "adam_betas", "0.9", ["ppo_update.adam_betas", "0.9", "list"]),
    ],
)
def test_wrong_type(tmp_path: Path, section: str, key: str, value: str, words: list[str]) -> None:
    found = one_problem(tmp_path, with_value(section, key, value))
    assert all(word in found for word in words), found


@pytest.mark.parametrize(
    "section, key, value, words",
    [
        ("advantages", "gae_lambda", "1.5", ["advantages.gae_lambda", "1.5", "less than or equal to 1"]),
        ("advantages", "gamma", "-0.1", ["advantages.gamma", "-0.1", "greater than or equal to 0"]),
        ("sampling", "temperature", "0.0", ["sampling.temperature", "0.0", "greater than or equal to 0.01"]),
        ("ppo_update", "clip_range", "1", ["ppo_update.clip_range", "1", "less than 1"]),
        ("ppo_update", "adam_betas", "[0.9, 1.0]", ["ppo_update.adam_betas.1", "1.0", "less than 1"]),
        ("ppo_update", "adam_betas", "[0.9]", ["ppo_update.adam_betas", "at least 2"]),
        ("ingest", "fraction", "0", ["ingest.fraction", "0", "greater than 0"]),
        ("ingest", "eval_fraction", "1.0", ["ingest.eval_fraction", "1.0", "less than 1"]),
        ("ppo_update", "lr_schedule", "cosin", ["ppo_update.lr_schedule", "'cosin'", "'cosine'"]),
        ("train_rm", "label_smoothing", "0.5", ["train_rm.label_smoothing", "0.5", "less than 0.5"]),
        ("train_rm", "ties", "count", ["train_rm.ties", "'count'", "'half'"]),
    ],
)
def test_out_of_range(tmp_path: Path, section: str, key: str, value: str, words: list[str]) -> None:
    found = one_problem(tmp_path, with_value(section, key, value))
    assert all(word in found for word in words), found


@pytest.mark.parametrize(
    "key, value", [("margin_coef", "1.0"), ("label_smoothing", "0.1"), ("soft_labels", "true"), ("ties", "half")]
)
def test_options_of_pairs_are_refused_for_whole_lists(tmp_path: Path, key: str, value: str) -> None:
    text = with_value("train_rm", key, value).replace("  loss: pairs ", "  loss: plackett_luce ")
    found = one_problem(tmp_path, text)
    assert (
        "train_rm" in found
        and f"plackett_luce takes no {key}: {value.capitalize() if value == 'true' else value}" in found
    )


@pytest.mark.parametrize("value", ["null", "~", ""])
def test_null_where_a_number_is_needed(tmp_path: Path, value: str) -> None:
    found = one_problem(tmp_path, with_value("advantages", "kl_coef", value))
    assert "advantages.kl_coef" in found
    assert "None" in found


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize(
    "section, key",
    [
        ("sampling", "temperature"),
        ("sampling", "gpu_memory_utilization"),
        ("ingest", "fraction"),
        ("ingest", "eval_fraction"),
        ("train_rm", "warmup_fraction"),
        ("score", "max_mismatch_k3"),
        ("advantages", "kl_coef"),
        ("advantages", "gae_lambda"),
        ("advantages", "score_clip"),
        ("ppo_update", "clip_range"),
        ("evaluate", "temperature"),
    ],
)
def test_nan_and_infinity_are_refused(tmp_path: Path, section: str, key: str, value: str) -> None:
    assert f"{section}.{key}" in one_problem(tmp_path, with_value(section, key, value))


def test_nan_inside_a_list_or_a_map_is_refused(tmp_path: Path) -> None:
    assert "adam_betas" in one_problem(tmp_path, with_value("ppo_update", "adam_betas", "[.nan, 0.9]"))
    assert "rewards.x.weight" in one_problem(tmp_path, with_rewards("{x: {kind: judge, weight: .nan}}"))


# YAML 1.2, as DVC reads it. YAML 1.1 would read 1e-5 as text, `no` as False and 0123 as octal 83.
def test_exponent_without_a_point_is_a_number(tmp_path: Path) -> None:
    assert load(tmp_path, with_value("ppo_update", "learning_rate", "1e-5")).params.ppo_update.learning_rate == 0.00001
    assert load(tmp_path, with_value("ppo_update", "learning_rate", "3e-4")).params.ppo_update.learning_rate == 0.0003


def test_number_that_dvc_writes_for_an_override_is_read(tmp_path: Path) -> None:
    # `dvc exp run -S ppo_update.learning_rate=5e-6` writes 5e-06.
    assert load(tmp_path, with_value("ppo_update", "learning_rate", "5e-06")).params.ppo_update.learning_rate == 5e-6


def test_leading_zero_is_decimal(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("seed: 0123\nlr: 1e-5\nkl: 3e-4\nlr2: 1.0e-5\nflag: no\n", encoding="utf-8")
    expected = {"seed": 123, "lr": 1e-05, "kl": 0.0003, "lr2": 1e-05, "flag": "no"}
    assert read_yaml(path) == expected and load_yaml(path) == expected


def test_integer_is_accepted_where_a_float_is_meant(tmp_path: Path) -> None:
    assert load(tmp_path, with_value("advantages", "gamma", "1")).params.advantages.gamma == 1.0


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("prompt_template", '"Solve it."', "which has no {prompt}: all prompts would be the same"),
        ("prompt_template", '""', "ingest.prompt_template is '': string should have at least 1 character"),
        ("prompt_key", "ground_truth", "prompt_key and ground_truth_key are both 'ground_truth'"),
        ("ground_truth_key", "null", "ingest.ground_truth_key is None"),
    ],
)
def test_prompts_that_could_not_be_read_as_meant(tmp_path: Path, key: str, value: str, words: str) -> None:
    assert words in one_problem(tmp_path, with_value("ingest", key, value))


def test_minibatch_that_does_not_divide_prints_both_numbers(tmp_path: Path) -> None:
    params = with_value("rollout", "prompts_per_iteration", "30", with_value("rollout", "samples_per_prompt", "3"))
    found = one_problem(tmp_path, with_value("ppo_update", "minibatch_size", "48", params))
    assert "ppo_update.minibatch_size (48)" in found
    assert "90 responses" in found


def test_prompt_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    params = with_value("sampling", "max_model_len", "300")
    found = one_problem(tmp_path, with_value("ingest", "max_prompt_tokens", "300", params))
    assert "ingest.max_prompt_tokens (300)" in found
    assert "sampling.max_model_len (300)" in found


def test_reward_model_without_preferences_is_refused(tmp_path: Path) -> None:
    source = "{{rm: {{kind: reward_model, weight: 1.0, path: {}}}}}"
    params = with_value("ingest", "preferences", "null", with_rewards(source.format("null")))
    assert "rewards.rm is the trained reward model, but ingest.preferences is null" in one_problem(tmp_path, params)
    load(tmp_path, with_value("ingest", "preferences", "null", with_rewards(source.format("models/mine"))))
    other = with_rewards(source.format("models/mine"), with_held_out(source.format("null")))
    found = one_problem(tmp_path, with_value("ingest", "preferences", "null", other))
    assert "evaluate.rewards.rm is the trained reward model, but ingest.preferences is null" in found


def test_remote_code_needs_a_revision(tmp_path: Path) -> None:
    assert "revision" in one_problem(tmp_path, with_value("base_model", "trust_remote_code", "true"))


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "data/prompts/x.jsonl", "data/raw/../x.jsonl", "data/raw", "raw.jsonl"]
)
def test_data_that_dvc_would_not_see_is_refused(tmp_path: Path, path: str) -> None:
    assert path in one_problem(tmp_path, with_value("ingest", "prompts", path))


def test_all_problems_of_both_files_at_once(tmp_path: Path) -> None:
    params = with_value("advantages", "gamma", "2.0", with_value("ppo_update", "ppo_epochs", "four"))
    found = "\n".join(problems(tmp_path, params, TWO.replace('prev: "1"', 'prev: "9"')))
    for words in ("advantages.gamma", "ppo_update.ppo_epochs", "iteration '2'"):
        assert words in found


def test_a_problem_of_params_is_not_repeated_for_every_iteration(tmp_path: Path) -> None:
    one_problem(tmp_path, with_value("advantages", "gae_lambda", "1.5"))
    one_problem(tmp_path, with_value("ppo_update", "minibatch_size", "1000000"))


def test_unquoted_iteration_keys_are_refused(tmp_path: Path) -> None:
    found = problems(tmp_path, iterations=TWO.replace('"1":', "1:").replace('"2":', "2:"))
    assert ["1 is not quoted" in found[0] and '"1":' in found[0], "2 is not quoted" in found[1], len(found)] == [
        True,
        True,
        2,
    ]


def test_unquoted_prev_is_refused(tmp_path: Path) -> None:
    found = "\n".join(problems(tmp_path, iterations=TWO.replace('prev: "1"', "prev: 1")))
    assert "iteration '2'" in found
    assert "prev" in found


def test_unknown_prev_names_what_there_is(tmp_path: Path) -> None:
    found = one_problem(tmp_path, iterations=TWO.replace('prev: "1"', 'prev: "7"'))
    assert "iteration '2': prev is '7'" in found
    assert "0, 1" in found


@pytest.mark.parametrize("prevs", [("2", "1"), ("1", "1")])
def test_prev_in_a_circle_is_refused(tmp_path: Path, prevs: tuple[str, str]) -> None:
    iterations = TWO.replace('prev: "0"', f'prev: "{prevs[0]}"').replace('prev: "1"}', f'prev: "{prevs[1]}"}}')
    assert "circle" in "\n".join(problems(tmp_path, iterations=iterations))


def test_two_iterations_may_branch_from_one(tmp_path: Path) -> None:
    branch = TWO + '  "2b": {prev: "1", rollout: {}, score: {}, advantages: {}, ppo_update: {}}\n'
    run = load(tmp_path, iterations=branch)
    assert run.chain("2b") == ["1", "2b"]
    assert run.chain("2") == ["1", "2"]


@pytest.mark.parametrize("key", ["0", "a-b", "a/b", "../x", "", "é"])
def test_iteration_names_that_are_not_directory_names_are_refused(tmp_path: Path, key: str) -> None:
    assert "iteration key" in "\n".join(problems(tmp_path, iterations=TWO.replace('"2":', f'"{key}":')))


def test_override_with_an_unknown_key_names_the_iteration(tmp_path: Path) -> None:
    found = one_problem(tmp_path, iterations=TWO.replace("advantages: {}, ppo", "advantages: {gae_lamda: 0.9}, ppo", 1))
    assert "iteration '1'" in found
    assert "advantages.gae_lamda (did you mean gae_lambda?)" in found


def test_override_with_a_bad_value_names_the_iteration(tmp_path: Path) -> None:
    iterations = TWO[: TWO.rindex("ppo_update: {}")] + "ppo_update: {clip_range: 0.0}}\n"
    found = one_problem(tmp_path, iterations=iterations)
    assert "iteration '2'" in found
    assert "ppo_update.clip_range is 0.0" in found


def test_override_that_breaks_the_minibatches_names_the_iteration(tmp_path: Path) -> None:
    iterations = TWO[: TWO.rindex("ppo_update: {}")] + "ppo_update: {minibatch_size: 1000000}}\n"
    found = one_problem(tmp_path, iterations=iterations)
    assert "iteration '2'" in found
    assert "(1000000)" in found


def test_adapters_stay_the_same_along_a_chain_and_may_differ_between_chains(tmp_path: Path) -> None:
    second = TWO.replace('"2": {prev: "1", rollout: {}, score: {}, advantages: {}, ppo_update: {}}', '"2": {prev: "%s",'
                         " rollout: {}, score: {}, advantages: {}, ppo_update: {lora_rank: 8}}")  # fmt: skip
    found = one_problem(tmp_path, iterations=second % "1")
    assert "iteration '2': ppo_update.lora_rank is 8, but 0 in iteration '1' before it" in found
    assert load(tmp_path, iterations=second % "0").at("2").ppo_update.lora_rank == 8


def test_override_reaches_its_iteration_only(tmp_path: Path) -> None:
    iterations = TWO[: TWO.rindex("advantages: {}")] + "advantages: {gae_lambda: 0.5}, ppo_update: {}}\n"
    run = load(tmp_path, with_value("advantages", "gae_lambda", "0.9"), iterations)
    assert run.at("2").advantages.gae_lambda == 0.5
    assert run.at("1") == run.params
    assert run.params.advantages.gae_lambda != 0.5
    assert run.at("2").ppo_update == run.params.ppo_update
    assert run.at("0") == run.params


def test_unknown_iteration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no iteration '5'; it has 1, 2"):
        load(tmp_path).at("5")


@pytest.mark.parametrize("section", ["rollout", "score", "advantages", "ppo_update"])
def test_override_section_must_be_there(tmp_path: Path, section: str) -> None:
    # DVC refuses a stage whose per-iteration parameters are missing, with words of its own, so we come first.
    found = one_problem(
        tmp_path, iterations=TWO.replace(f"{section}: {{}}, ", "", 1).replace(f", {section}: {{}}}}", "}", 1)
    )
    assert f"missing key {section}" in found


@pytest.mark.parametrize("iterations", ["", "[]", "iterations:", "iterations: {}\nmore: 1\n", "iterations: 3"])
def test_iterations_of_another_shape(tmp_path: Path, iterations: str) -> None:
    assert "iterations.yaml" in one_problem(tmp_path, iterations=iterations)


def test_no_iterations_is_allowed(tmp_path: Path) -> None:
    assert load(tmp_path, iterations="iterations: {}\n").iterations == {}


@pytest.mark.parametrize("params", ["", "[]", "just text"])
def test_params_of_another_shape(tmp_path: Path, params: str) -> None:
    assert one_problem(tmp_path, params).startswith("params.yaml: expected a map")


@pytest.mark.parametrize("broken", ["seed: [1\n", "seed: 1\nseed: 2\n", "a:\n\tb: 1\n"])
def test_broken_yaml_says_where(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"params.yaml: not valid YAML: (.|\n)*line \d+, column \d+"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("2024-02-30", "day is out of range for month; put text that looks like a date"),  # meant as a revision
        ("!!float x", "could not convert string to float: 'x'"),
        ('!!int ""', "put text that looks like a date or a number in quotes"),
        ("!!bool maybe", "'maybe'"),
        ("1" * 5000, "Exceeds the limit"),
        ("[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_value_that_the_yaml_reader_itself_breaks_on(tmp_path: Path, value: str, words: str) -> None:
    assert words in problems(tmp_path, with_value("base_model", "revision", value))[0]


def test_file_of_another_encoding_says_where(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes("seed: 0\n# Bär\n".encode("windows-1252"))
    with pytest.raises(ConfigError, match=r"params\.yaml: expected UTF-8, found byte 0xe4 in line 2; save the file"):
        read_yaml(path)
    path.write_bytes(b"\xef\xbb\xbfseed: .5e-5\r\n")
    assert read_yaml(path) == {"seed": 5e-6}


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(b"seed: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"params\.yaml"):
        read_yaml(path)


def test_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"params\.yaml: no such file"):
        load_run(tmp_path)


def test_everything_is_frozen(tmp_path: Path) -> None:
    run: Any = load(tmp_path)
    for owner, name in (
        (run, "params"),
        (run.params, "seed"),
        (run.params.score, "max_mismatch_k3"),
        (run.iterations["1"], "prev"),
    ):
        with pytest.raises(ValueError, match="frozen"):
            setattr(owner, name, None)


def several(*changes: tuple[str, str, str]) -> str:
    """params.yaml with several values replaced."""
    text = PARAMS
    for section, key, value in changes:
        text = with_value(section, key, value, text)
    return text


@pytest.mark.parametrize(
    "changes, words",
    [
        ([("critic", "kind", "none")], ["advantages.estimator is gae", "critic.kind is none"]),
        (
            [
                ("critic", "kind", "none"),
                ("advantages", "estimator", "rloo"),
                ("ppo_update", "critic_warmup_iterations", 2),
            ],
            ["ppo_update.critic_warmup_iterations is 2", "critic.kind is none"],
        ),
        ([("critic", "init", "reward_model")], ["critic: init is 'reward_model'", "kind to separate"]),
        (
            [("critic", "kind", "none"), ("critic", "init", "gpt2"), ("advantages", "estimator", "rloo")],
            ["critic: init"],
        ),
        ([("advantages", "kl_estimator", "full")], ["kl_estimator is full", "score.full_kl: true"]),
        ([("advantages", "estimator", "grpo"), ("rollout", "samples_per_prompt", "1")], ["grpo", "samples_per_prompt"]),
        ([("score", "replay", "[1]")], ["score.replay", "advantages.correction"]),
        ([("score", "replay", "[1, 1]")], ["score: replay is [1, 1]", "once"]),
        ([("score", "replay", "[0]")], ["score.replay.0", "greater than or equal to 1"]),
        ([("rollout", "prompts_per_iteration", "0")], ["prompts_per_iteration is 0", "nothing to train on"]),
        (
            [("ppo_update", "old_logprobs", "sampler"), ("advantages", "correction", "mask")],
            ["advantages.correction is mask", "old_logprobs is sampler"],
        ),
        (
            [("advantages", "missing_eos_mode", "scale"), ("advantages", "missing_eos_penalty", "1.5")],
            ["advantages: missing_eos_penalty is 1.5", "0 to 1"],
        ),
        ([("advantages", "kl_controller", "adaptive"), ("advantages", "kl_coef", "0.0")], ["kl_coef is 0"]),
        ([("advantages", "estimator", "rloo"), ("advantages", "whiten_rewards", "true")], ["rloo", "whiten_rewards"]),
        (
            [("advantages", "kl_controller", "adaptive"), ("advantages", "kl_horizon", "20")],
            ["advantages.kl_horizon (20)", "128 responses"],
        ),
        ([("advantages", "overlong_buffer", "41")], ["overlong_buffer (41)", "max_new_tokens (40)"]),
        ([("advantages", "correction_min", "1.0")], ["advantages.correction_min is 1.0", "less than 1"]),
        ([("advantages", "correction_max", "1.0")], ["advantages.correction_max is 1.0", "greater than 1"]),
        ([("ppo_update", "dual_clip", "1.0")], ["ppo_update.dual_clip is 1.0", "greater than 1"]),
    ],
)
def test_options_that_contradict_each_other_are_named_together(
    tmp_path: Path, changes: list[tuple[str, str, str]], words: list[str]
) -> None:
    found = one_problem(tmp_path, several(*changes))
    assert all(word in found for word in words), found


@pytest.mark.parametrize(
    "changes",
    [
        [("critic", "kind", "none"), ("advantages", "estimator", "rloo")],
        [("critic", "kind", "separate"), ("critic", "init", "reward_model")],
        [("score", "replay", "[1, 2]"), ("advantages", "correction", "truncate")],
        [("score", "replay", "[1]"), ("ppo_update", "old_logprobs", "sampler")],
        [("score", "replay", "[1]"), ("advantages", "correction", "mask"), ("rollout", "prompts_per_iteration", "0")],
        [("score", "full_kl", "true"), ("advantages", "kl_estimator", "full")],
        [("ppo_update", "value_clip_range", "null"), ("ppo_update", "clip_range_high", "1.5")],
    ],
)
def test_options_that_fit_each_other_are_accepted(tmp_path: Path, changes: list[tuple[str, str, str]]) -> None:
    assert load(tmp_path, several(*changes)).params.seed == 0
