"""Rows of artifacts: filters that cannot run code, sorting, computed columns, reading no more than is shown."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.errors import ArtifactError, ModelError, RlhfError
from rlhf_core.report import inspect
from rlhf_core.report.filters import parse_filter
from rlhf_core.report.inspect import (
    SortKey,
    column_names,
    default_columns,
    parse_sort,
    select_rows,
    sources,
    token_texts,
)
from tests.fake_run import build

TABLE = pa.table(
    {
        "score": pa.array([0.25, 0.75, None, -1.0], pa.float32()),
        "other": pa.array([0.0, 1.0, 2.0, -1.0], pa.float32()),
        "finish_reason": ["stop", "length", "stop", None],
        "response": ["it's so", "sorry", "", "a+b"],
        "ids": [[1], [2, 3], [], [4]],
    }
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("run"), prompts=6, samples=2)


def kept(text: str) -> list[int]:
    mask = parse_filter(text).mask(TABLE).to_pylist()
    return [index for index, value in enumerate(mask) if value]


@pytest.mark.parametrize(
    "text, rows",
    [
        ("score > 0.5", [1]),
        ("score > -2", [0, 1, 3]),
        ("score >= 0.25 and finish_reason == 'stop'", [0]),
        ('score > 0.5 or finish_reason == "stop"', [0, 1, 2]),  # unknown or true is true
        ("not score > 0.5", [0, 3]),  # not unknown stays unknown
        ("not (score > 0.5 or other == 2)", [0, 3]),
        ("0 < score <= 0.5", [0]),
        ("0.5 < score", [1]),
        ("score == other", [3]),
        ("score is None", [2]),
        ("finish_reason is not None", [0, 1, 2]),
        ("finish_reason in ('stop', 'abort')", [0, 2]),
        ("finish_reason not in ['stop']", [1]),
        ("'so' in response", [0, 1]),
        ("'+' in response", [3]),  # text, not a pattern
        ("'so' not in response", [2, 3]),
        ("response == ''", [2]),
        ("finish_reason != 'stop'", [1]),
    ],
)
def test_filters(text: str, rows: list[int]) -> None:
    assert kept(text) == rows


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true') == 0",
        "score.__class__ == 1",
        "(lambda: 1)() == score",
        "[x for x in score] == 1",
        "score[0] == 1",
        "score + 1 > 0",
        "f'{score}' == 'a'",
        "score if score else other",
        "(score := 1) > 0",
        "score",
        "1 < 2",
        "score == None",
        "score is 1",
        "score in other",
        "score in ()",
        "score in (1, other)",
        "score > ",
        "score = 1",
        "import os",
        "",
        "score > 1; other > 1",
        "score > 1\nother > 1",
        "not " * 5000 + "score > 1",
        "(" * 900 + "score > 1" + ")" * 900,
        "not " * 400 + "score > 1 +",
        "\x00",
    ],
)
def test_anything_else_is_refused_with_help(text: str) -> None:
    with pytest.raises(RlhfError, match="filter"):
        parse_filter(text)


def test_deep_but_legal_nesting_does_not_crash() -> None:
    assert kept("not " * 300 + "score > 0.5") == [1]


@pytest.mark.parametrize(
    "text, words", [("score > 'a'", "score is float"), ("ids == 1", "ids is list"), ("'a' in score", "score is float")]
)
def test_values_that_cannot_be_compared_name_the_type(text: str, words: str) -> None:
    with pytest.raises(RlhfError, match=words):
        kept(text)


def rows(path: Path, columns: list[str], **options: object) -> list[dict[str, object]]:
    defaults: dict[str, object] = {"where": None, "sort": [], "limit": 0, "sample_id": None}
    return select_rows(path, columns=columns, **{**defaults, **options}).to_pylist()  # type: ignore[arg-type]


def test_sources_of_a_file_a_directory_and_all_iterations(run: Path) -> None:
    scores = run / "data/scores"
    assert len(sources(scores / "iteration=2/part-00001.parquet")) == 1
    assert [source.iteration for source in sources(scores / "iteration=2")] == ["2", "2"]
    assert [source.iteration for source in sources(scores)] == ["1", "1", "2", "2", "3", "3"]
    assert [source.iteration for source in sources(run / "data/prompts")] == [None]


def test_iterations_are_in_numeric_order(tmp_path: Path, run: Path) -> None:
    for name in ("10", "9", "2"):
        (tmp_path / f"iteration={name}").symlink_to(run / "data/scores/iteration=1")
    assert [source.iteration for source in sources(tmp_path)][::2] == ["2", "9", "10"]


def test_computed_columns(run: Path) -> None:
    path = run / "data/scores"
    source = pq.read_table(path / "iteration=3/part-00001.parquet").to_pylist()
    found = rows(path / "iteration=3/part-00001.parquet", ["kl", "response_length", "num_tokens", "iteration"])
    for row, made in zip(source, found, strict=True):
        assert made["kl"] == pytest.approx(
            sum(a - b for a, b in zip(row["logprobs"], row["ref_logprobs"], strict=True)), abs=1e-6
        )
        assert made["response_length"] == len(row["response_ids"])
        assert made["num_tokens"] == len(row["prompt_ids"]) + len(row["response_ids"])
        assert made["iteration"] == "3"


def test_an_empty_response_has_length_and_kl_zero(run: Path) -> None:
    found = rows(run / "data/scores/iteration=1", ["sample_id", "kl"], where=parse_filter("response_length == 0"))
    assert found == [{"sample_id": "1-train002-0", "kl": 0.0}]


def test_artifacts_offer_only_what_can_be_computed(run: Path) -> None:
    assert "kl" not in column_names(sources(run / "data/rollouts")[0])
    assert "response_length" in column_names(sources(run / "data/rollouts")[0])
    # Lists of lists in preferences and no response in prompts: nothing to compute.
    for name in ("preferences", "prompts"):
        assert not {"kl", "response_length", "num_tokens"} & set(column_names(sources(run / "data" / name)[0]))


def test_default_columns(run: Path) -> None:
    available = column_names(sources(run / "data/advantages")[0])
    assert default_columns(available, several_iterations=True) == [
        "iteration", "sample_id", "finish_reason", "score_reward_model", "score", "kl", "num_tokens", "response_length",
        "prompt", "response",
    ]  # fmt: skip
    available = column_names(sources(run / "data/evaluations/iteration=1")[0])
    shown = default_columns(available, several_iterations=False)
    assert shown[1:5] == ["finish_reason", "score_judge", "score", "reward_model_score"]


def test_filter_sort_and_limit_agree_with_plain_python(run: Path) -> None:
    everything = rows(run / "data/scores", ["sample_id", "score", "kl", "finish_reason"])
    assert len(everything) == 36
    expected = [row for row in everything if row["finish_reason"] == "stop" and row["kl"] > 0]
    expected = sorted(expected, key=lambda row: (-row["score"], row["kl"]))[:5]
    found = rows(
        run / "data/scores",
        ["sample_id", "score", "kl", "finish_reason"],
        where=parse_filter("finish_reason == 'stop' and kl > 0"),
        sort=parse_sort("-score,kl"),
        limit=5,
    )
    assert found == expected


def test_ties_stay_in_file_order_and_nulls_go_last(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"key": [3, None, 1, 3, 1], "row": range(5)}), path)
    assert [row["row"] for row in rows(path, ["row"], sort=parse_sort("key"))] == [2, 4, 0, 3, 1]
    assert [row["row"] for row in rows(path, ["row"], sort=parse_sort("-key"))] == [0, 3, 2, 4, 1]


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 1024])
def test_rows_do_not_depend_on_batches(run: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int) -> None:
    monkeypatch.setattr(inspect, "BATCH_ROWS", batch_rows)
    found = rows(
        run / "data/scores", ["sample_id"], where=parse_filter("sample_id in ('3-train005-1', '1-train000-0')")
    )
    assert [row["sample_id"] for row in found] == ["1-train000-0", "3-train005-1"]
    names = [row["sample_id"] for row in rows(run / "data/scores", ["sample_id"], sort=[SortKey("sample_id", True)])]
    assert names == sorted(names, reverse=True) and len(names) == 36


def test_rows_do_not_depend_on_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"row": range(10), "odd": [index % 2 for index in range(10)]}), path, row_group_size=3)
    assert [row["row"] for row in rows(path, ["row"], where=parse_filter("odd == 1"))] == [1, 3, 5, 7, 9]
    assert [row["row"] for row in rows(path, ["row"], limit=4)] == [0, 1, 2, 3]


def test_one_row_by_id(run: Path) -> None:
    assert rows(run / "data/scores", ["sample_id"], sample_id="2-train003-1") == [{"sample_id": "2-train003-1"}]
    assert rows(run / "data/prompts", ["split"], sample_id="eval001") == [{"split": "eval"}]
    assert rows(run / "data/prompts", ["split"], sample_id="eval0") == []


def damage(path: Path, column: str) -> None:
    """Overwrite the pages of one column."""
    metadata = pq.ParquetFile(path).metadata
    index = pq.ParquetFile(path).schema_arrow.names.index(column)
    chunk = metadata.row_group(0).column(index)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(bytes(content))


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    path = build(tmp_path, prompts=6, samples=2) / "data/rollouts/iteration=1"
    damage(path / "part-00001.parquet", "sample_id")
    assert len(rows(path, ["sample_id"], limit=6)) == 6  # the first shard has six
    with pytest.raises(ArtifactError, match=r"part-00001\.parquet: damaged"):
        rows(path, ["sample_id"], limit=7)


def test_columns_that_are_not_shown_are_not_read(tmp_path: Path) -> None:
    path = build(tmp_path, prompts=4, samples=1) / "data/evaluations/iteration=0"
    damage(path / "part-00000.parquet", "prompt")
    assert len(rows(path, ["sample_id", "score_judge"], sort=parse_sort("-score_judge"))) == 4
    with pytest.raises(ArtifactError, match="damaged"):
        rows(path, ["prompt"])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"columns": ["scroe"]}, "has no column scroe; it has sample_id"),
        ({"where": "scroe > 1"}, "has no column scroe"),
        ({"sort": "-scroe"}, "has no column scroe"),
        ({"sort": "response_ids"}, "sort: column response_ids holds list"),
        ({"sort": "score,"}, "expected column names"),
    ],
)
def test_unknown_and_unsuitable_columns(run: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(RlhfError, match=words):
        rows(
            run / "data/scores",
            options.get("columns", ["score"]),  # type: ignore[arg-type]
            where=parse_filter(str(options["where"])) if "where" in options else None,
            sort=parse_sort(str(options.get("sort", "score"))),
        )


def test_missing_path_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such directory; run `dvc repro`"):
        sources(tmp_path / "data/scores")


def test_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("not parquet")
    with pytest.raises(ArtifactError, match="not a readable Parquet file"):
        rows(path, ["a"])


def test_token_texts(run: Path) -> None:
    directory = run / "data/checkpoints/policy/0"
    # Byte tokens 5.. in the order of the byte alphabet: "!" is 5, so "A" is 37 and "a" 69. Id 2 is <eos>. The bytes of
    # "é" (0xC3 0xA9) are half a character each, so they are shown as the vocabulary writes them.
    from tests.fake_run import tokenizer

    ids = tokenizer().encode("a é").ids
    assert token_texts(directory, [37, *ids, 2]) == ["A", "a", " ", "Ã", "©", "<eos>"]


def test_token_texts_of_another_tokenizer(run: Path, tmp_path: Path) -> None:
    assert token_texts(run / "data/checkpoints/policy/0", [37, 9999]) == ["A", "[id 9999]"]  # of a padded vocabulary
    with pytest.raises(ModelError, match="name a model directory"):
        token_texts(tmp_path, [1])
