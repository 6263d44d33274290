"""The group `rewards` of params.yaml: what is refused, and in which words.

Mutations that must fail here: the kind left in a key's name; no hint for a misspelt key of a source; a name with a dash
taken; a pattern not compiled; a URL with a password taken.
"""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from rlhf_core import reward_config
from rlhf_core.reward_config import KINDS, TRANSPORT
from tests.unit.test_config import PARAMS, load, one_problem, problems, with_held_out, with_rewards

HTTP = "{kind: http, weight: 1.0, url: '%s', batch_size: 8, timeout_s: 5, retries: 2, backoff_s: 1, auth_env: %s}"
LLM = (
    "{kind: llm_judge, weight: 1.0, base_url: 'http://h/v1', model: m, prompt: '%s', pattern: '%s', min_score: %s,"
    " max_score: 10, temperature: 0, max_reply_tokens: 20, concurrency: 4, timeout_s: 5, retries: 2, backoff_s: 1,"
    " auth_env: null}"
)
CODE = (
    "{kind: code, weight: 1.0, seconds: 10, memory_mb: %s, disk_mb: 16, processes: 8, output_kb: 64, workers: 2,"
    " allow_unisolated: false}"
)
EVERY_KIND = [
    "{kind: reward_model, weight: 1.0, path: null}",
    "{kind: reward_model, weight: -1, path: models/other}",
    "{kind: judge, weight: 0}",
    "{kind: regex, weight: 1.0, pattern: '^a+$', match: search}",
    "{kind: exact_answer, weight: 1.0}",
    "{kind: last_number, weight: 1.0, partial_credit: 0.5}",
    "{kind: length, weight: 1.0, min_tokens: 0, max_tokens: 20, falloff_tokens: 10}",
    "{kind: json_format, weight: 1.0, required_keys: []}",
    "{kind: json_format, weight: 1.0, required_keys: [a, b]}",
    "{kind: repetition, weight: 1.0, ngram: 3}",
    "{kind: language, weight: 1.0, language: en}",
    "{kind: python, weight: 1.0, function: 'example:mentions_the_question'}",
    HTTP % ("https://host:8000/score?x=1", "TOKEN"),
    HTTP % ("http://host", "null"),
    LLM % ("Rate: {response}", r"(\d+)", 0),
    CODE % 512,
]


@pytest.mark.parametrize("source", EVERY_KIND)
def test_every_kind_is_accepted_as_documented(tmp_path: Path, source: str) -> None:
    params = load(tmp_path, with_rewards(f"{{x_1: {source}}}", with_held_out(f"{{x_2: {source}}}"))).params
    assert params.rewards["x_1"] == params.evaluate.rewards["x_2"] and params.rewards["x_1"].kind in source


def test_every_kind_is_tried_here() -> None:
    assert {source.split(",")[0].removeprefix("{kind: ") for source in EVERY_KIND} == set(KINDS)
    assert set(TRANSPORT) <= {key for model in KINDS.values() for key in model.model_fields}


def test_every_kind_starts_with_kind_and_weight_and_has_no_default() -> None:
    models = [item for item in vars(reward_config).values() if isinstance(item, type) and issubclass(item, BaseModel)]
    assert len(models) == len(KINDS) + 1  # and Section
    for name, model in KINDS.items():
        assert list(model.model_fields)[:2] == ["kind", "weight"], name
        assert all(field.is_required() for field in model.model_fields.values()), name


@pytest.mark.parametrize(
    "rewards, words",
    [
        ("{}", ["rewards", "at least 1"]),
        ("1.0", ["rewards is 1.0", "dictionary"]),
        ("{x: 1.0}", ["rewards.x", "1.0"]),
        ("{x: {weight: 1.0}}", ["missing key rewards.x.kind: expected reward_model, judge, regex"]),
        ("{x: {kind: 3, weight: 1.0}}", ["rewards.x.kind is '3': expected reward_model"]),
        ("{x: {kind: jugde, weight: 1.0}}", ["rewards.x.kind is 'jugde'", "(did you mean judge?)"]),
        ("{x: {kind: judge}}", ["missing key rewards.x.weight"]),
        ("{x: {kind: judge, weight: one}}", ["rewards.x.weight is 'one'", "number"]),
        ("{x: {kind: judge, weight: .inf}}", ["rewards.x.weight is inf", "finite"]),
        (
            "{a-b: {kind: judge, weight: 1}}",
            ["rewards.a-b: expected a name of 1 to 64 letters, digits and underscores"],
        ),
        ("{'a/b': {kind: judge, weight: 1}}", ["rewards.a/b: expected a name"]),
        ("{'': {kind: judge, weight: 1}}", ["expected a name"]),
        ("{x: {kind: regex, weight: 1, pattern: '(', match: search}}", ["rewards.x.pattern", "is not a regular expr"]),
        ("{x: {kind: regex, weight: 1, pattern: a, match: find}}", ["rewards.x.match is 'find'", "'fullmatch'"]),
        (
            "{x: {kind: last_number, weight: 1, partial_credit: 1.0}}",
            ["rewards.x.partial_credit is 1.0", "less than 1"],
        ),
        (
            "{x: {kind: length, weight: 1, min_tokens: 9, max_tokens: 8, falloff_tokens: 1}}",
            ["rewards.x: min_tokens (9) must not be above max_tokens (8)"],
        ),
        (
            "{x: {kind: length, weight: 1, min_tokens: 0, max_tokens: 8, falloff_tokens: 0}}",
            ["rewards.x.falloff_tokens is 0", "greater than or equal to 1"],
        ),
        ("{x: {kind: repetition, weight: 1, ngram: 2.0}}", ["rewards.x.ngram is 2.0", "integer"]),
        ("{x: {kind: python, weight: 1, function: mine.f}}", ["rewards.x.function is 'mine.f'", "module:function"]),
        ("{x: {kind: python, weight: 1, function: '../a:f'}}", ["rewards.x.function", "module:function"]),
        (
            "{x: {kind: language, weight: 1, language: en-US}}",
            ["rewards.x.language: 'en-US'", "did you mean en? docs/rewards.md"],
        ),
        ("{x: {kind: language, weight: 1, language: eng}}", ["did you mean en?"]),
        ("{x: {kind: language, weight: 1, language: zxx}}", ["is not a language code that is known"]),
        ("{x: " + CODE % 8 + "}", ["rewards.x.memory_mb is 8", "greater than or equal to 64"]),
        ("{x: " + HTTP % ("ftp://host", "null") + "}", ["rewards.x.url: 'ftp://host': expected http://host"]),
        ("{x: " + HTTP % ("host:80", "null") + "}", ["rewards.x.url", "expected http://host"]),
        ("{x: " + HTTP % ("http://host:99999", "null") + "}", ["rewards.x.url", "0-65535"]),
        ("{x: " + HTTP % ("http://host", "MY-TOKEN") + "}", ["rewards.x.auth_env: expected the name of an env"]),
        ("{x: " + LLM % ("Rate it", r"(\d+)", 0) + "}", ["rewards.x.prompt", "has no {response}"]),
        ("{x: " + LLM % ("{response}", r"\d+", 0) + "}", ["rewards.x.pattern", "has 0 groups: expected one"]),
        ("{x: " + LLM % ("{response}", r"(\d+)", 10) + "}", ["rewards.x: min_score (10.0) must be below max_score"]),
    ],
)
def test_what_is_wrong_with_a_source_is_named(tmp_path: Path, rewards: str, words: list[str]) -> None:
    found = one_problem(tmp_path, with_rewards(rewards))
    assert found.startswith("params.yaml: ")
    assert all(word in found for word in words), found


def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path: Path) -> None:
    found = one_problem(tmp_path, with_rewards("{x: " + HTTP % ("http://me:pass@host", "null") + "}"))
    assert "auth_env" in found and "pass@" not in found


def test_a_misspelt_key_of_a_source_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    found = problems(tmp_path, with_rewards("{x: {kind: regex, weight: 1, patern: a, match: search}}"))
    assert found == [
        "params.yaml: missing key rewards.x.pattern",
        "params.yaml: unknown key rewards.x.patern (did you mean pattern?)",
    ]


@pytest.mark.parametrize(
    "rewards, message",
    [
        ("{x: {kind: jugde, weight: 1.0}}", "evaluate.rewards.x.kind is 'jugde': expected reward_model"),
        ("{x: {weight: 1.0}}", "missing key evaluate.rewards.x.kind: expected reward_model"),
        ("{x: {kind: judge}}", "missing key evaluate.rewards.x.weight"),
        ("{a-b: {kind: judge, weight: 1}}", "evaluate.rewards.a-b: expected a name of 1 to 64"),
        (
            "{x: {kind: length, weight: 1, min_tokens: 9, max_tokens: 8, falloff_tokens: 1}}",
            "evaluate.rewards.x: min_tokens (9) must not be above max_tokens (8)",
        ),
        (
            "{x: {kind: judge, weight: 1, wieght: 2}}",
            "unknown key evaluate.rewards.x.wieght (did you mean weight?)",
        ),
        ("{}", "evaluate.rewards is {}: dictionary should have at least 1"),
    ],
)
def test_held_out_sources_are_refused_in_the_same_words(tmp_path: Path, rewards: str, message: str) -> None:
    assert one_problem(tmp_path, with_held_out(rewards)).startswith(f"params.yaml: {message}")


def test_rewards_under_score_are_an_unknown_key(tmp_path: Path) -> None:
    params = with_rewards("{x: {kind: judge, weight: 1.0}}").replace("\nscore:", "\nscore:\n  rewards: {judge: 1.0}")
    assert "unknown key score.rewards" in one_problem(tmp_path, params)


# --- docs/rewards.md ----------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"(?s)```yaml\n(.*?)```", PAGE))
def test_the_examples_of_the_page_are_valid(tmp_path: Path, block: str) -> None:
    rewards, _, held_out = block.removeprefix("rewards:").partition("evaluate:\n  rewards:")
    text = with_held_out(held_out) if held_out else PARAMS
    assert load(tmp_path, with_rewards(rewards, text)).params.rewards


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_defined_on_the_page(kind: str) -> None:
    assert f"**{kind}**" in PAGE or f"\n| {kind} |" in PAGE or f"kind: {kind}" in PAGE
