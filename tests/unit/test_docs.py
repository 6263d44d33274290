"""The reference pages say what the code does: columns, parameters, metrics, ranges, and queries that run."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from rlhf_core.artifacts import schema
from rlhf_core.config import Params
from rlhf_core.report import health
from rlhf_core.reward_config import KINDS
from tests.docs_runner import Query, queries, run
from tests.fake_run import build

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
QUESTIONS = queries(DOCS / "inspecting.md")

# The names that other tools and people rely on, whatever a stage writes today.
CONTRACT = set(
    """
eval/accuracy eval/accuracy_ties_half eval/ties eval/margin_mean eval/loss eval/calibration_error
eval/length_baseline_accuracy eval/pairs train/loss train/pairs dropped/identical_after_truncation
prompts/train prompts/eval pairs/train pairs/eval
rollout/responses rollout/tokens rollout/empty_responses rollout/finished rollout/response_length_mean
dropped/prompt_too_long objective/kl objective/entropy objective/scores objective/scores_std score/reward_model_mean
score/reward_model_std mismatch/k1 mismatch/k3 mismatch/max_abs mismatch/mean_abs mismatch/clip_fraction mismatch/ess
val/num_eos_tokens score/responses objective/non_score_reward objective/rlhf_reward objective/scores_final
advantages/mean advantages/std returns/mean returns/std values/mean val/explained_variance advantages/tokens
advantages/empty_responses policy/approxkl_avg policy/approxkl_k3_avg policy/clipfrac_avg policy/entropy_avg
loss/policy_avg loss/value_avg val/clipfrac_avg val/ratio val/ratio_var policy/max_first_ratio_error grad_norm_avg lr
optimizer_steps episode val/explained_variance_after eval/score_mean eval/score_std eval/reward_model_mean
eval/finished eval/kl eval/response_length_mean eval/responses eval/prompts eval/score_gain eval/score_gain_low
eval/score_gain_high iterations eval/score_base eval/score_final
""".split()  # noqa: SIM905 - a block of names reads better than a list
)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def tables(text: str) -> dict[str, list[list[str]]]:
    """Heading -> rows of the tables below it, cells stripped, header and rule left out."""
    found: dict[str, list[list[str]]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        elif line.startswith("|"):
            found.setdefault(title, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return {title: rows[2:] for title, rows in found.items()}


# --- artifacts.md -------------------------------------------------------------------------------------------------


def written(kind: pa.DataType) -> str:
    """An Arrow type without the names of list items, which differ between versions."""
    if pa.types.is_list(kind):
        return f"list<{written(kind.value_type)}>"
    return str(kind)


SCORES = schema.scores_schema(["<source>"], full_kl=True)


@pytest.mark.parametrize(
    "heading, expected, above",
    [
        ("data/prompts", schema.PROMPTS, 0),
        ("data/preferences", schema.PREFERENCES, 0),
        ("data/rollouts", schema.ROLLOUTS, 0),
        ("data/scores", SCORES, len(schema.ROLLOUTS)),
        ("data/advantages", schema.advantages_schema(SCORES), len(SCORES)),
        ("data/evaluations", schema.evaluations_schema(["<source>"]), len(schema.ROLLOUTS)),
    ],
)
def test_every_column_is_documented_in_order(heading: str, expected: pa.Schema, above: int) -> None:
    found = [(row[0].strip("`"), row[1]) for row in tables(page("artifacts.md"))[heading]]
    assert found == [(field.name, written(field.type)) for field in list(expected)[above:]]


def test_token_columns_have_their_shape_and_what_may_be_null_is_named() -> None:
    text = page("artifacts.md")
    for title, rows in tables(text).items():
        for row in rows:
            if title.startswith("data/") and row[0].strip("`") in schema.ALIGNED:
                assert row[2] == "[T]" and row[3]
    assert all(f"`{name}`" in text.split("## data/prompts")[0] for name in schema.NULLABLE)


# --- parameters.md ------------------------------------------------------------------------------------------------


def test_every_parameter_is_documented_and_no_other() -> None:
    found = tables(page("parameters.md"))
    single = ("seed", "conventions")
    assert [row[0].strip("`") for row in found.pop("Parameters")] == list(single)
    expected = {name: field.annotation for name, field in Params.model_fields.items() if name not in single}
    assert list(found) == list(expected)
    for name, model in expected.items():
        # Of reward sources, the keys of all kinds, each once.
        kinds: list[Any] = list(KINDS.values()) if name == "rewards" else [model]
        fields = {field: None for kind in kinds for field in kind.model_fields}
        assert [row[0].strip("`") for row in found[name]] == list(fields), name
        assert all(row[1] and row[2] and row[3] for row in found[name]), name


# --- metrics.md ---------------------------------------------------------------------------------------------------


def documented() -> set[str]:
    text = page("metrics.md")
    names = {name for rows in tables(text).values() for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    # What a row's meaning or the text above a table names counts too: examples and per-step columns.
    return names | set(re.findall(r"`([a-z]+/[a-z_0-9]+)`", text)) | {"step", "grad_norm"}


def test_every_metric_of_the_contract_is_documented() -> None:
    assert sorted(CONTRACT - documented()) == []


def test_every_metric_that_the_code_writes_is_documented() -> None:
    groups = "objective|policy|val|loss|eval|train|rollout|score|mismatch|advantages|returns|values"
    wanted = set()
    for path in [*(PROJECT / "rlhf_core").rglob("*.py"), *(PROJECT / "stages").glob("*.py")]:
        wanted |= set(re.findall(rf'"((?:{groups})/[a-z][a-z_0-9]*)"', path.read_text(encoding="utf-8")))
    assert len(wanted) > 40
    assert sorted(wanted - documented()) == []


def test_every_metric_of_a_run_is_documented(tmp_path: Path) -> None:
    root = build(tmp_path, prompts=2, samples=1)
    names = {name for file in (root / "data/metrics").rglob("*.json") for name in json.loads(file.read_text())}
    assert sorted(names - documented()) == []


# --- health.md ----------------------------------------------------------------------------------------------------


def test_every_range_is_documented_with_its_value() -> None:
    rows = tables(page("health.md"))["The report and its health table"]
    found = {row[1].strip("`"): float(row[2]) for row in rows}
    constants = {name: value for name, value in vars(health).items() if re.fullmatch(r"[A-Z][A-Z_]+", name)}
    assert found == constants
    assert all(row[3] for row in rows)


# --- inspecting.md ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("run"), prompts=6, samples=3)


def test_there_are_ten_questions_and_four_ways_to_ask() -> None:
    assert [query.title.split(".")[0] for query in QUESTIONS] == [str(number) for number in range(1, 11)]
    text = page("inspecting.md")
    assert all(name in text for name in ("import polars", "import pandas", "from datasets", "read_parquet("))


@pytest.mark.parametrize("query", [*QUESTIONS, *queries(DOCS / "artifacts.md")], ids=lambda query: query.title)
def test_queries_run(query: Query, artifacts: Path, tmp_path: Path) -> None:
    assert run(query, artifacts, tmp_path).strip()


def test_answers_are_right(artifacts: Path, tmp_path: Path) -> None:
    # The made-up run: 6 prompts, 3 responses each, 3 iterations; KL 0.03 (k - 1) nats a token in iteration k.
    with contextlib.chdir(artifacts):
        rows = duckdb.sql(QUESTIONS[0].code).fetchall()
    assert [(row[0], row[1]) for row in rows] == [(1, 18), (2, 18), (3, 18)]
    for place, (*_, kl, _, tokens) in enumerate(rows):
        assert kl == pytest.approx(0.03 * place * tokens, rel=1e-4)
    assert "num_rows: 6" in run(QUESTIONS[9], artifacts, tmp_path)
    assert "of 6 prompts; mean gain +" in run(QUESTIONS[8], artifacts, tmp_path)
