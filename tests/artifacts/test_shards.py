"""Round trips of sharded Parquet, and one fault per test."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from rlhf_core.artifacts import shards
from rlhf_core.artifacts.schema import PREFERENCES, PROMPTS, ROLLOUTS, SCHEMA_VERSION, advantages_schema, scores_schema
from rlhf_core.artifacts.shards import (
    iter_tables,
    ragged,
    ragged_array,
    read_metadata,
    read_shard,
    read_table,
    remove_unfinished,
    shard_name,
    shard_paths,
    write_shard,
)
from rlhf_core.errors import ArtifactError, NumericError, RowMismatch, SchemaMismatch

METADATA = {"stage": "rollout", "iteration": "1", "temperature": 0.7, "inputs": {"prompts": "ab" * 32}}


def row(sample: str, ids: list[int], logprobs: list[float] | None = None, **other: Any) -> dict[str, Any]:
    prompt, index = sample.split("-")
    return {
        "sample_id": f"1-{sample}",
        "prompt_id": prompt,
        "sample_index": int(index),
        "prompt": "say hello",
        "prompt_ids": [1, 264],
        "response": "ab",
        "response_ids": ids,
        "sampler_logprobs": [-0.5] * len(ids) if logprobs is None else logprobs,
        "finish_reason": "stop",
        "ground_truth": None,
        **other,
    }


ROWS = [row("p0-0", [69, 70, 2], [-0.1, -0.2, -0.3]), row("p0-1", [], []), row("p1-0", [2], [-1.5])]


def write(directory: Path, *parts: list[dict[str, Any]]) -> Path:
    for index, rows in enumerate(parts):
        table = pa.Table.from_pylist(rows) if rows else ROLLOUTS.empty_table()
        write_shard(directory / shard_name(index), table, ROLLOUTS, METADATA)
    return directory


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    """Two shards: ROWS, and one row more."""
    return write(tmp_path / "rollouts", ROWS, [row("p2-0", [5, 6], [-0.5, -1.0])])


def rewrite(path: Path, table: pa.Table, metadata: dict[str, Any] | None) -> None:
    """Write a Parquet file behind the back of the code under test, with the metadata it is to have."""
    packed = {} if metadata is None else {b"rlhf": json.dumps(metadata).encode()}
    pq.write_table(table.replace_schema_metadata(packed), path)


def with_column(path: Path, name: str, values: Any) -> pa.Table:
    table = pq.read_table(path, partitioning=None)
    return table.set_column(table.column_names.index(name), name, values)


VERSIONED = {**METADATA, "schema_version": SCHEMA_VERSION}

# --- round trips --------------------------------------------------------------------------------------------------


def test_round_trip_keeps_rows_types_and_empty_lists(rollouts: Path) -> None:
    table = read_table(rollouts)
    assert table.schema.equals(ROLLOUTS)
    found = table.to_pylist()
    assert [line["response_ids"] for line in found] == [[69, 70, 2], [], [2], [5, 6]]
    assert found[1]["sampler_logprobs"] == []  # not null, not [0.0]
    assert found[0]["sampler_logprobs"] == [float(np.float32(x)) for x in (-0.1, -0.2, -0.3)]
    assert [line["sample_id"] for line in found] == ["1-p0-0", "1-p0-1", "1-p1-0", "1-p2-0"]
    assert all(line["ground_truth"] is None for line in found)


def test_metadata_is_plain_json_under_one_key_with_the_schema_version(rollouts: Path) -> None:
    assert read_metadata(rollouts) == {**METADATA, "schema_version": 3}
    raw = pq.read_metadata(rollouts / "part-00000.parquet").metadata[b"rlhf"]
    assert json.loads(raw) == {**METADATA, "schema_version": 3}


def test_same_content_gives_same_bytes_whatever_the_column_order_and_chunks(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS, schema=ROLLOUTS)
    write_shard(tmp_path / "a" / shard_name(0), table, ROLLOUTS, METADATA)
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1, 2)]).select(ROLLOUTS.names[::-1])
    write_shard(tmp_path / "b" / shard_name(0), chunked, ROLLOUTS, dict(reversed(METADATA.items())))
    assert (tmp_path / "a" / shard_name(0)).read_bytes() == (tmp_path / "b" / shard_name(0)).read_bytes()


def test_rewriting_what_was_read_gives_the_same_bytes(rollouts: Path, tmp_path: Path) -> None:
    for name, table in iter_tables(rollouts):
        write_shard(tmp_path / "again" / name, table, ROLLOUTS, METADATA)
        assert (tmp_path / "again" / name).read_bytes() == (rollouts / name).read_bytes()


def test_shards_are_read_in_numeric_order(tmp_path: Path) -> None:
    for index in (10, 2, 0, 1, *range(3, 10)):
        write_shard(tmp_path / shard_name(index), pa.Table.from_pylist([row(f"p{index}-0", [2])]), ROLLOUTS, METADATA)
    assert read_table(tmp_path, ["prompt_id"])["prompt_id"].to_pylist() == [f"p{i}" for i in range(11)]
    assert [name for name, _ in iter_tables(tmp_path)] == [f"part-{i:05d}.parquet" for i in range(11)]


def test_projection_reads_only_the_columns_asked_for_in_that_order(rollouts: Path) -> None:
    table = read_table(rollouts, ["sampler_logprobs", "prompt_id"])
    assert table.column_names == ["sampler_logprobs", "prompt_id"]  # prompt_id repeats: the row key is sample_id
    assert table["prompt_id"].to_pylist() == ["p0", "p0", "p1", "p2"]


# pola-rs/polars#17227: with inferred types the first file's list<null> decides, and the order of files matters.
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_all_empty_lists_and_zero_rows_have_the_fixed_schema_in_any_order(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    parts = [[row("p0-0", [])], [row("p1-0", [5, 6], [-0.5, -1.0])], []]
    write(tmp_path, *(parts[index] for index in order))
    for path in shard_paths(tmp_path):
        assert pq.read_schema(path).field("response_ids").type == pa.list_(pa.int32())
        assert pq.read_schema(path).field("sampler_logprobs").type == pa.list_(pa.float32())
    # As our reader, and as anyone's dataset reader, sees it.
    for table in (read_table(tmp_path), ds.dataset([str(path) for path in shard_paths(tmp_path)]).to_table()):
        found = {line["prompt_id"]: (line["response_ids"], line["sampler_logprobs"]) for line in table.to_pylist()}
        assert found == {"p0": ([], []), "p1": ([5, 6], [-0.5, -1.0])}


# apache/arrow#14229 at 2**31 items, here with a limit of 1,000: 30 x 64 = 1,920 items, floor(1000 / 64) = 15 rows fit.
def test_row_groups_stay_below_the_list_item_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_LIST_ITEMS", 1000)
    rows = [row(f"p{index}-0", list(range(64))) for index in range(30)]
    write(tmp_path, rows)
    metadata = pq.read_metadata(tmp_path / shard_name(0))
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [15, 15]
    column = read_table(tmp_path, ["response_ids"])["response_ids"]
    assert [len(chunk.flatten()) for chunk in column.chunks] == [960, 960]
    values, offsets = ragged(column)
    assert len(values) == 1920 and offsets.tolist() == [64 * index for index in range(31)]


def test_row_groups_break_where_the_fullest_column_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_LIST_ITEMS", 10)
    # Items per row: prompt_ids 2, response_ids 4, 7, 3, 0, 10 -> groups of 4 | 7 + 3 + 0 | 10.
    write(tmp_path, [row(f"p{index}-0", [7] * count) for index, count in enumerate([4, 7, 3, 0, 10])])
    metadata = pq.read_metadata(tmp_path / shard_name(0))
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [1, 3, 1]


def test_row_groups_count_the_items_of_lists_within_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_LIST_ITEMS", 10)
    pairs = [pair(str(index), [[7] * 3, [8] * 3]) for index in range(3)]  # 6 ids a pair: one pair a row group
    write_shard(tmp_path / shard_name(0), pa.Table.from_pylist(pairs), PREFERENCES, {"stage": "ingest"})
    assert pq.read_metadata(tmp_path / shard_name(0)).num_row_groups == 3
    assert read_table(tmp_path)["response_ids"].to_pylist() == [[[7] * 3, [8] * 3]] * 3


def test_a_list_longer_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_LIST_ITEMS", 10)
    with pytest.raises(ArtifactError, match=r"row 1 \(sample_id '1-p1-0'\): a list of more than 10 items"):
        write(tmp_path, [row("p0-0", [2]), row("p1-0", [7] * 11)])


def pair(name: str, ids: list[list[int]], **other: Any) -> dict[str, Any]:
    return {
        "pair_id": name,
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": "hi",
        "prompt_ids": [1, 5],
        "responses": ["yes", "no"],
        "response_ids": ids,
        "ranks": [0, 1],
        "margin": None,
        "agreement": None,
        "source": "x.jsonl",
        "split": "train",
        **other,
    }


def test_preferences_keep_null_messages_null_margins_and_nested_ids(tmp_path: Path) -> None:
    rows = [pair("a", [[7, 2], [2]], messages=None), pair("b", [[8], [9, 9, 2]], margin=1.5)]
    write_shard(
        tmp_path / shard_name(0), pa.Table.from_pylist(rows, schema=PREFERENCES), PREFERENCES, {"stage": "ingest"}
    )
    assert read_table(tmp_path).to_pylist() == rows


def test_scores_and_advantages_append_columns_to_what_was_read(rollouts: Path, tmp_path: Path) -> None:
    scores = scores_schema(["reward_model", "judge"])
    assert scores.names == [
        *ROLLOUTS.names, "logprobs", "ref_logprobs", "values", "bootstrap_value", "score_reward_model", "score_judge",
        "score",
    ]  # fmt: skip
    name, table = next(iter_tables(rollouts))
    lists = [[-0.1, -0.2, -0.3], [], [-1.0]]
    for column in ("logprobs", "ref_logprobs", "values"):
        table = table.append_column(column, pa.array(lists))
    for column in ("bootstrap_value", "score_reward_model", "score_judge", "score"):
        table = table.append_column(column, pa.array([1.0, 2.0, 3.0]))
    write_shard(tmp_path / "scores" / name, table, scores, METADATA)
    scored = read_table(tmp_path / "scores")
    for column in ("importance_weights", "rewards", "advantages", "returns"):
        scored = scored.append_column(column, pa.array(lists))
    scored = scored.append_column("bootstrap_return", pa.array([None, None, 1.0]))
    write_shard(tmp_path / "advantages" / name, scored, advantages_schema(scores), METADATA)
    assert read_table(tmp_path / "advantages").column_names == [
        *scores.names, "importance_weights", "rewards", "advantages", "returns", "bootstrap_return",
    ]  # fmt: skip


def test_without_a_critic_there_are_no_values_and_no_returns_and_the_full_kl_comes_when_asked_for() -> None:
    scores = scores_schema(["judge"], critic=False, full_kl=True)
    assert scores.names == [*ROLLOUTS.names, "logprobs", "ref_logprobs", "full_kl", "score_judge", "score"]
    assert advantages_schema(scores).names == [*scores.names, "importance_weights", "rewards", "advantages"]


# --- ragged -------------------------------------------------------------------------------------------------------


def test_ragged_of_slices_and_chunks() -> None:
    first = pa.array([[1.0, 2.0], [3.0], [], [4.0, 5.0, 6.0]], pa.list_(pa.float32())).slice(1)
    column = pa.chunked_array([first, pa.array([], first.type), pa.array([[7.0]], first.type)])
    values, offsets = ragged(column)
    assert values.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0] and values.dtype == np.float32
    assert offsets.tolist() == [0, 1, 1, 4, 5] and offsets.dtype == np.int64
    values[0] = 9.0  # a copy that may be written to
    assert first.to_pylist()[0] == [3.0]


def test_ragged_of_no_rows() -> None:
    values, offsets = ragged(pa.chunked_array([], pa.list_(pa.int32())))
    assert values.dtype == np.int32 and values.size == 0 and offsets.tolist() == [0]


def test_ragged_array_is_the_inverse_of_ragged() -> None:
    array = ragged_array(np.array([1.5, 2.5, 3.5]), np.array([0, 2, 2, 3]), pa.float32())
    assert array.type == pa.list_(pa.float32()) and array.to_pylist() == [[1.5, 2.5], [], [3.5]]
    values, offsets = ragged(array)
    assert values.tolist() == [1.5, 2.5, 3.5] and offsets.tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], []])
def test_ragged_array_refuses_offsets_that_do_not_fit(offsets: list[int]) -> None:
    with pytest.raises(RowMismatch, match="offsets must rise from 0 to the 3 values"):
        ragged_array(np.zeros(3), np.array(offsets, np.int64), pa.float32())


def test_ragged_refuses_null_lists_and_null_items() -> None:
    for column in (pa.array([[1], None]), pa.array([[1, None]])):
        with pytest.raises(RowMismatch, match="null"):
            ragged(column)
    with pytest.raises(SchemaMismatch, match="expected a column of lists, found int64"):
        ragged(pa.array([1]))


# --- faults in what is written ------------------------------------------------------------------------------------


def refused(
    tmp_path: Path, rows: list[dict[str, Any]], error: type[ArtifactError] | type[NumericError], text: str
) -> None:
    path = tmp_path / shard_name(0)
    with pytest.raises(error, match=text):
        write_shard(path, pa.Table.from_pylist(rows), ROLLOUTS, METADATA)
    assert list(tmp_path.iterdir()) == []


def test_lists_of_different_length_are_refused_by_file_row_and_column(tmp_path: Path) -> None:
    bad = row("p0-1", [69, 70, 2], [-0.1, -0.2])
    text = r"part-00000.parquet: row 1 \(sample_id '1-p0-1'\), column sampler_logprobs: 2 values for 3 response_ids"
    refused(tmp_path, [ROWS[0], bad], RowMismatch, text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_float_that_is_not_finite_is_refused_by_row_and_position(tmp_path: Path, value: float) -> None:
    bad = row("p9-4", [3, 4, 5], [-0.5, -0.1, value])
    text = (
        rf"row 2 \(sample_id '1-p9-4'\), column sampler_logprobs, position 2: expected a finite number, found {value}"
    )
    refused(tmp_path, [ROWS[0], ROWS[1], bad], NumericError, text)


def test_infinities_whose_sum_is_no_infinity_are_refused(tmp_path: Path) -> None:
    bad = row("p9-4", [3, 4, 5], [float("inf"), -0.1, float("-inf")])
    text = r"row 0 \(sample_id '1-p9-4'\), column sampler_logprobs, position 0: expected a finite number, found inf"
    refused(tmp_path, [bad], NumericError, text)


def test_finite_numbers_whose_sum_overflows_are_written(tmp_path: Path) -> None:
    large = float(np.finfo(np.float32).max)
    path = tmp_path / shard_name(0)
    write_shard(path, pa.Table.from_pylist([row("p9-4", [3, 4, 5], [large] * 3)]), ROLLOUTS, METADATA)
    assert read_shard(path)["sampler_logprobs"].to_pylist() == [[large] * 3]


def test_a_nan_score_is_refused_by_row(tmp_path: Path) -> None:
    pairs = [pair("a", [[2], [2]]), pair("b", [[2], [2]], margin=float("nan"))]
    with pytest.raises(
        NumericError, match=r"row 1 \(pair_id 'b'\), column margin: expected a finite number, found nan"
    ):
        write_shard(tmp_path / shard_name(0), pa.Table.from_pylist(pairs), PREFERENCES, {})


def test_a_float_that_overflows_float32_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, [row("p0-0", [3], [1e300])], NumericError, "column sampler_logprobs, position 0")


def test_a_null_among_floats_is_refused(tmp_path: Path) -> None:
    bad = row("p1-0", [3, 4], [-0.5, None])  # type: ignore[list-item]
    refused(
        tmp_path, [ROWS[0], bad], RowMismatch, r"row 1 \(sample_id '1-p1-0'\), column sampler_logprobs: .* found a null"
    )


def test_a_null_list_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path,
        [ROWS[0], row("p1-0", [], prompt_ids=None)],
        RowMismatch,
        r"row 1 .*column prompt_ids: .* found a null",
    )


def test_a_null_text_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path, [row("p1-0", [2], finish_reason=None)], RowMismatch, r"row 0 .*column finish_reason: .* found a null"
    )


def test_a_repeated_sample_id_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, [ROWS[0], ROWS[1], ROWS[0]], RowMismatch, "sample_id '1-p0-0' occurs 2 times")


def test_a_missing_column_is_refused(tmp_path: Path) -> None:
    rows = [{name: value for name, value in ROWS[0].items() if name != "finish_reason"}]
    refused(tmp_path, rows, SchemaMismatch, "missing finish_reason, unknown none")


def test_an_unknown_column_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, [{**ROWS[0], "reward": 1.0}], SchemaMismatch, "missing none, unknown reward")


def test_text_is_not_taken_for_numbers(tmp_path: Path) -> None:
    refused(tmp_path, [row("p0-0", ["69"], [-0.1])], SchemaMismatch, "column response_ids is list<item: string>")  # type: ignore[list-item]


def test_an_id_beyond_int32_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, [row("p0-0", [2**31], [-0.1])], SchemaMismatch, "column response_ids is list<item: int64>")


# --- faults in what is read ---------------------------------------------------------------------------------------


def test_no_directory_and_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere: no such directory; run `dvc repro`"):
        shard_paths(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="holds no shard"):
        shard_paths(tmp_path)


def test_a_missing_column_is_named(rollouts: Path) -> None:
    with pytest.raises(SchemaMismatch, match=r"part-00000.parquet: missing column values; it has sample_id, prompt_id"):
        read_table(rollouts, ["sample_id", "values"])


def test_a_wrong_dtype_is_named(rollouts: Path) -> None:
    path = rollouts / "part-00001.parquet"
    rewrite(path, with_column(path, "response_ids", pa.array([[5, 6]], pa.list_(pa.int64()))), VERSIONED)
    with pytest.raises(
        SchemaMismatch, match=r"part-00001.parquet: column response_ids is list<.*int64>; expected list<.*int32>"
    ):
        read_table(rollouts)


def test_another_schema_version_is_refused(rollouts: Path) -> None:
    path = rollouts / "part-00001.parquet"
    rewrite(path, pq.read_table(path, partitioning=None), {**METADATA, "schema_version": 99})
    with pytest.raises(SchemaMismatch, match=r"part-00001.parquet: schema version 99; this code reads version 3"):
        read_table(rollouts)


def test_a_foreign_parquet_file_is_refused(rollouts: Path) -> None:
    path = rollouts / "part-00001.parquet"
    rewrite(path, pq.read_table(path, partitioning=None), None)
    for read in (read_table, read_metadata):
        with pytest.raises(SchemaMismatch, match=r"part-00001.parquet: a Parquet file without our metadata"):
            read(rollouts)


def test_shards_of_two_runs_are_not_mixed(rollouts: Path) -> None:
    write_shard(
        rollouts / shard_name(1), pa.Table.from_pylist([row("p2-0", [2])]), ROLLOUTS, {**METADATA, "temperature": 1.0}
    )
    with pytest.raises(
        ArtifactError, match=r"part-00001.parquet: its metadata differs from part-00000.parquet's in temperature"
    ):
        read_metadata(rollouts)


def test_a_sample_id_in_two_shards_is_refused(rollouts: Path) -> None:
    write_shard(rollouts / shard_name(1), pa.Table.from_pylist([ROWS[0]]), ROLLOUTS, METADATA)
    with pytest.raises(RowMismatch, match="sample_id '1-p0-0' occurs 2 times"):
        read_table(rollouts)


def test_a_nan_on_disk_is_refused(rollouts: Path) -> None:
    path = rollouts / "part-00001.parquet"
    rewrite(
        path, with_column(path, "sampler_logprobs", pa.array([[-0.5, float("nan")]], pa.list_(pa.float32()))), VERSIONED
    )
    with pytest.raises(
        NumericError, match=r"part-00001.parquet: row 0 \(sample_id '1-p2-0'\), column sampler_logprobs, position 1"
    ):
        read_table(rollouts, ["sampler_logprobs"])


def test_lists_of_different_length_on_disk_are_refused_even_without_the_ids_column(rollouts: Path) -> None:
    path = rollouts / "part-00001.parquet"
    rewrite(path, with_column(path, "sampler_logprobs", pa.array([[-0.5]], pa.list_(pa.float32()))), VERSIONED)
    with pytest.raises(
        RowMismatch, match=r"row 0 \(sample_id '1-p2-0'\), column sampler_logprobs: 1 values for 2 response_ids"
    ):
        read_table(rollouts, ["sampler_logprobs"])


def test_a_file_cut_short_is_named(rollouts: Path) -> None:
    path = rollouts / "part-00001.parquet"
    os.truncate(path, path.stat().st_size - 20)
    for read in (shard_paths, read_metadata, read_table, lambda d: list(iter_tables(d))):
        with pytest.raises(ArtifactError, match=r"part-00001.parquet: truncated"):
            read(rollouts)


def test_a_file_of_zero_bytes_is_named(rollouts: Path) -> None:
    os.truncate(rollouts / "part-00000.parquet", 0)
    with pytest.raises(ArtifactError, match=r"part-00000.parquet: 0 bytes"):
        shard_paths(rollouts)


def test_a_file_that_is_not_parquet_is_named(rollouts: Path) -> None:
    (rollouts / "part-00000.parquet").write_text("sample_id,response\n")
    with pytest.raises(ArtifactError, match=r"part-00000.parquet: not a Parquet file"):
        shard_paths(rollouts)


def test_a_flipped_bit_never_changes_a_value_unnoticed(rollouts: Path) -> None:
    path = rollouts / "part-00000.parquet"
    good, data = read_shard(path), path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    found = []
    for offset in range(4, footer, 3):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :])
        try:
            assert read_shard(path).equals(good)  # some header fields carry no data
        except ArtifactError as error:
            found.append(str(error))
    assert len(found) > footer / 3 / 2 and all("part-00000.parquet" in text for text in found)


def test_a_file_that_is_no_shard_is_refused(rollouts: Path) -> None:
    (rollouts / "part-1.parquet.tmp").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"part-1.parquet.tmp: expected only part-00000.parquet"):
        shard_paths(rollouts)


def test_a_hole_in_the_numbering_is_refused(rollouts: Path) -> None:
    (rollouts / "part-00000.parquet").unlink()
    with pytest.raises(ArtifactError, match=r"part-00000.parquet: missing, though part-00001.parquet is there"):
        shard_paths(rollouts)


def test_leftovers_of_an_interrupted_write_are_ignored_and_removed(rollouts: Path) -> None:
    leftover = rollouts / ".part-00002.parquet.tmp"
    leftover.write_bytes(b"PAR1 half a shard")
    assert [path.name for path in shard_paths(rollouts)] == ["part-00000.parquet", "part-00001.parquet"]
    assert remove_unfinished(rollouts) == [".part-00002.parquet.tmp"]
    assert not leftover.exists() and read_table(rollouts).num_rows == 4


def test_a_failed_write_leaves_the_finished_shard_as_it_was(rollouts: Path) -> None:
    before = (rollouts / shard_name(0)).read_bytes()
    with pytest.raises(NumericError):
        write_shard(
            rollouts / shard_name(0), pa.Table.from_pylist([row("p0-0", [3], [float("nan")])]), ROLLOUTS, METADATA
        )
    assert (rollouts / shard_name(0)).read_bytes() == before


def test_prompts_keep_unusual_line_separators(tmp_path: Path) -> None:
    line = {
        "prompt_id": "p", "messages": None, "prompt": "a\u2028b\u0085c\r\n\ufeff", "prompt_ids": [1],
        "ground_truth": '{"a": 1}', "source": "f", "split": "train",
    }  # fmt: skip
    write_shard(tmp_path / shard_name(0), pa.Table.from_pylist([line]), PROMPTS, {"stage": "ingest"})
    assert read_table(tmp_path).to_pylist() == [line]
