"""The artifacts of a real run open in the tools that people use, and the checkpoint in transformers."""

import re
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas as pd
import polars as pl
import pytest

from tests.docs_runner import Query, queries, run
from tests.meta.project import ROOT
from tests.pipeline.project import Repro

pytestmark = pytest.mark.vllm

ROWS = 16  # 8 prompts, 2 samples each


@pytest.fixture(autouse=True)
def in_project(project: Path, first: tuple[Repro, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All paths below are those that a person types in the project's root."""
    monkeypatch.chdir(project)


def check(rows: list[dict[str, Any]]) -> None:
    """Rows of iteration 1: unique keys, aligned lists, readable text."""
    assert len(rows) == ROWS
    assert len({row["sample_id"] for row in rows}) == ROWS
    for row in rows:
        assert len(row["response_ids"]) == len(row["sampler_logprobs"]) <= 8
        assert all(value <= 0 for value in row["sampler_logprobs"])
        assert "say" in row["prompt"]
        assert row["finish_reason"] in ("stop", "length")


def test_duckdb_reads_rollouts_with_their_iteration() -> None:
    query = "SELECT * FROM 'data/rollouts/*/*.parquet' WHERE iteration = 1"
    result = duckdb.sql(query)
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]
    check(rows)


def test_pandas_reads_rollouts_with_their_iteration() -> None:
    frame = pd.read_parquet("data/rollouts")
    frame = frame[frame["iteration"].astype(str) == "1"]
    check(frame.to_dict("records"))


def test_polars_reads_rollouts_with_their_iteration() -> None:
    frame = (
        pl.scan_parquet("data/rollouts/*/*.parquet", hive_partitioning=True).filter(pl.col("iteration") == 1).collect()
    )
    check(frame.to_dicts())


def test_datasets_reads_rollouts(tmp_path: Path) -> None:
    files = "data/rollouts/iteration=1/*.parquet"
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))
    check(rows.to_list())


def test_the_last_file_of_an_iteration_holds_all_columns_of_the_earlier_ones() -> None:
    columns = duckdb.sql("SELECT * FROM 'data/advantages/iteration=1/*.parquet' LIMIT 0").columns
    wanted = ["sample_id", "prompt", "response", "sampler_logprobs", "logprobs", "ref_logprobs", "values", "score"]
    assert [name for name in wanted if name not in columns] == []
    assert columns[-6:-1] == ["importance_weights", "rewards", "advantages", "returns", "bootstrap_return"]
    assert columns[-1] == "iteration"


def test_advantages_are_whitened_over_the_iteration() -> None:
    # Another road to a documented property: DuckDB's mean and population variance over all tokens.
    mean, variance = duckdb.sql(
        "WITH tokens AS (SELECT unnest(advantages)::DOUBLE AS a FROM 'data/advantages/iteration=1/*.parquet')"
        " SELECT avg(a), var_pop(a) FROM tokens"
    ).fetchall()[0]
    assert abs(mean) < 1e-6
    assert abs(variance - 1) < 1e-4


def test_checkpoint_loads_in_transformers_and_has_learnt() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = "data/checkpoints/policy/1"
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 1"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    with torch.no_grad():
        after, before = (
            AutoModelForCausalLM.from_pretrained(where).float()(ids).logits
            for where in (path, "data/checkpoints/policy/0")
        )
    assert torch.isfinite(after).all()
    assert not torch.equal(after, before)
    assert (Path(path) / "README.md").read_text(encoding="utf-8").startswith("#")


@pytest.mark.parametrize("query", queries(ROOT / "docs/inspecting.md"), ids=lambda query: query.title)
def test_documented_question_has_an_answer(query: Query, project: Path, tmp_path: Path) -> None:
    here = Query(query.title, query.language, re.sub(r"(iteration *= *)'?[2-9]'?", r"\g<1>1", query.code))
    assert run(here, project, tmp_path).strip()
