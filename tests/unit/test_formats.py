"""Reading rows with their position, and what the keys of a row mean.

Mutations that must fail here: split lines with str.splitlines; keep the BOM; count only good lines; accept NaN or a
repeated key; cut an implicit prompt inside a word, or at the first shared turn; lose white space at the cut.
"""

import gzip
import json
import re
import shutil
import subprocess
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.errors import DataError
from rlhf_core.ingest.formats import Row, read_rows, source_hash
from rlhf_core.ingest.shapes import Pair, Refused, pair_of, split_implicit
from rlhf_core.ingest.shapes import prompt_of as prompt_with

KEYS = {"prompt_key": "prompt", "prompt_template": None, "ground_truth_key": "ground_truth"}


prompt_of = partial(prompt_with, **KEYS)


def write(path: Path, data: bytes) -> str:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def values(source: str) -> list[dict]:
    return [row.values for row in read_rows(source)]


def row(**keys) -> Row:
    return Row("file:1", "file", keys)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# --- JSON lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("change", ["plain", "crlf", "bom", "blank last line", "no last newline"])
def test_line_separators_inside_a_string_do_not_end_a_line(tmp_path, name, change):
    """wbolster/jsonlines#53: U+2028 and U+0085 unescaped inside a string; str.splitlines would see four lines."""
    data = '{"prompt":"a\u2028b"}\n{"prompt":"c\u0085d"}\n'.encode()
    data = {
        "plain": data,
        "crlf": data.replace(b"\n", b"\r\n"),
        "bom": b"\xef\xbb\xbf" + data,
        "blank last line": data + b"\n",
        "no last newline": data[:-1],
    }[change]
    assert values(write(tmp_path / name, data)) == [{"prompt": "a\u2028b"}, {"prompt": "c\u0085d"}]


def test_positions_count_blank_lines(tmp_path):
    source = write(tmp_path / "a.jsonl", b'{"prompt":"a"}\n\n{"prompt":"b"}\n')
    assert [one.where for one in read_rows(source)] == [f"{source}:1", f"{source}:3"]


def test_key_that_is_null_first_and_text_later(tmp_path):
    """huggingface/datasets#7222: types inferred from the first block break on a later one."""
    lines = [json.dumps({"prompt": f"p{index}", "system": None}) for index in range(3000)]
    lines.append('{"prompt":"last","system":"be brief"}')
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    (tmp_path / "2.jsonl").write_text('{"prompt":"without"}\n')
    prompts = [prompt_of(one) for one in read_rows(str(tmp_path))]
    assert [one.content for one in prompts[:3000]] == [f"p{index}" for index in range(3000)]
    assert prompts[3000].content == [turn("system", "be brief"), turn("user", "last")]
    assert prompts[3001].content == "without"
    (tmp_path / "0.jsonl").write_text('{"prompt":"x"}\n{"prompt":"y","system":[]}\n')
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/0.jsonl:2: system: expected text, found list")):
        [prompt_of(one) for one in read_rows(str(tmp_path))]


@pytest.mark.parametrize(
    ("data", "column", "words"),
    [
        (b'{"prompt": "a"', 15, "delimiter"),
        (b'{"prompt": "a"} {"prompt": "b"}', 17, "Extra data"),
        (b"{'prompt': 1}", 2, "property name"),
        (b"plain text", 1, "Expecting value"),
    ],
)
def test_malformed_line_is_named_with_line_column_and_text(tmp_path, data, column, words):
    source = write(tmp_path / "a.jsonl", b'{"prompt":"fine"}\n' + data + b"\n")
    with pytest.raises(DataError) as error:
        values(source)
    message = str(error.value)
    assert message.startswith(f"{source}:2:{column}: not valid JSON: ")
    assert words in message and repr(data.decode())[1:12] in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' occurs twice"),
        (b'{"prompt": [{"role": "user", "role": "user"}]}', "'role' occurs twice"),
        (b'{"prompt": "a", "margin": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "margin": -Infinity}', "-Infinity is not a JSON number"),
        (b"[1, 2]", "expected an object with keys, found list"),
        (b'"text"', "expected an object with keys, found str"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"id": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_line_that_python_would_accept_or_crash_on(tmp_path, line, words):
    source = write(tmp_path / "a.jsonl", b'{"prompt":"fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=re.escape(words)) as error:
        values(source)
    assert f"{source}:2" in str(error.value)


def test_invalid_utf8_is_named_with_its_column(tmp_path):
    # The column counts characters: the two-byte "é" is one.
    source = write(tmp_path / "a.jsonl", b'{"prompt":"ok"}\n{"prompt":"\xc3\xa9\xff"}\n')
    with pytest.raises(DataError, match=re.escape(f"{source}:2:13: expected UTF-8, found byte 0xff")):
        values(source)


def test_utf16_file(tmp_path):
    source = write(tmp_path / "a.jsonl", '{"prompt":"a"}\n'.encode("utf-16"))
    with pytest.raises(DataError, match="found UTF-16: save the file as UTF-8"):
        values(source)


def test_half_a_surrogate_pair(tmp_path):
    """Python reads the escape, and crashes when the text is written."""
    source = write(tmp_path / "a.jsonl", b'{"prompt":"ab\\ud800"}\n')
    with pytest.raises(DataError, match=re.escape(f"{source}:1: prompt: character 2 is \\ud800")):
        [prompt_of(one) for one in read_rows(source)]


def test_truncated_gzip_file(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt":"a"}\n' * 5000)[:-20])
    with pytest.raises(DataError, match="damaged gzip file after line"):
        values(str(path))


def test_array_in_a_jsonl_file_says_how_to_name_it(tmp_path):
    source = write(tmp_path / "a.jsonl", b'[\n{"prompt":"a"}\n]\n')
    with pytest.raises(DataError, match=re.escape("must be named *.json")):
        values(source)


# --- other sources --------------------------------------------------------------------------------------------------


def test_json_array_with_the_line_of_each_object(tmp_path):
    source = write(tmp_path / "a.json", b'[\n  {"prompt": "a"},\n  {\n  "prompt": "b"}, {"prompt": "c"}\n]\n')
    rows = list(read_rows(source))
    assert [one.values["prompt"] for one in rows] == ["a", "b", "c"]
    assert [one.where for one in rows] == [f"{source}:2", f"{source}:3", f"{source}:4"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"prompt": "a"}', "expected one JSON array of objects"),
        (b'[{"prompt": "a"}', "a.json:1:17: not valid JSON"),
        (b'[{"prompt": "a"},\n {"prompt": }]', "a.json:2:13: not valid JSON"),
        (b'[{"prompt": "a"},\n]', "a.json:2:1: not valid JSON"),
        (b'[{"prompt": "a"}\n{"prompt": "b"}]', "a.json:2:1: not valid JSON"),
        (b'[{"prompt": "a"}]\n[]', "a.json:2:1: not valid JSON"),
        (b'[{"prompt": "a"},\n{"prompt": NaN}]', "a.json:2: NaN is not"),
        (b"[]", "expected at least one row"),
        (b"", "expected one JSON array"),
    ],
)
def test_broken_json_array(tmp_path, data, words):
    with pytest.raises(DataError, match=re.escape(words)):
        values(write(tmp_path / "a.json", data))


def test_parquet_rows_and_positions(tmp_path):
    path = tmp_path / "a.parquet"
    turns = [[turn("user", "a")], [turn("user", "b")]]
    pq.write_table(pa.table({"prompt": turns, "split": pa.array([None, "test"])}), path)
    rows = list(read_rows(str(path)))
    assert [one.values for one in rows] == [{"prompt": turns[0]}, {"prompt": turns[1], "split": "test"}]
    assert [one.where for one in rows] == [f"{path} row 0", f"{path} row 1"]


def conversation(*items: str) -> pa.DataType:
    """A list of turns as data sets of one schema for all have it, with the keys of tools."""
    return pa.list_(
        pa.struct([(name, pa.list_(pa.string()) if name == "tool_calls" else pa.string()) for name in items])
    )


def test_parquet_types_that_writers_choose(tmp_path):
    """pandas categories, Polars' large types, DuckDB's decimals and empty tool calls hold what plain types hold."""
    shape = pa.struct([(name, pa.string()) for name in ("role", "content")])
    tools = pa.list_(pa.struct([*shape, ("name", pa.string()), ("tool_calls", pa.list_(pa.string()))]))
    columns = {
        "dictionary": pa.array(["q"]).dictionary_encode(),
        "large text": pa.array(["q"], pa.large_string()),
        "view": pa.array(["q"], pa.string_view()),
        "large list": pa.array([[turn("user", "q")]], pa.large_list(shape)),
        "tool calls": pa.array([[{**turn("user", "q"), "name": "", "tool_calls": []}]], tools),
    }
    for name, column in columns.items():
        decimals = pa.array([Decimal("0.50")]), pa.array([Decimal(2**70)], pa.decimal128(38, 0))
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"prompt": column, "margin": decimals[0], "ground_truth": decimals[1]}), path)
        (found,) = read_rows(str(path))
        assert prompt_of(found).content in ("q", [turn("user", "q")])
        assert prompt_of(found).ground_truth == "1180591620717411303424"
        answers = {"chosen": [turn("assistant", "a")], "rejected": [turn("assistant", "b")]}
        assert pair_of(Row("w", "s", found.values | answers)).margin == 0.5


def test_parquet_without_row_groups(tmp_path):
    pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("prompt", pa.string())])).close()
    with pytest.raises(DataError, match="expected at least one row"):
        values(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("kind", "number"), [(pa.timestamp("us"), 2**62), (pa.date32(), 2**31 - 1), (pa.timestamp("s", "Nowhere/No"), 0)]
)
def test_parquet_column_that_python_has_no_value_for_is_named(tmp_path, kind, number):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "created": pa.array([number], kind)}), path)
    with pytest.raises(DataError, match=r"a\.parquet: the column created \(Parquet .*leave it out of the file"):
        values(str(path))


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (gzip.compress(b'{"prompt":"a"}', mtime=0), "a gzip file: end its name in .gz"),
        (b"\x28\xb5\x2f\xfd\x20", "a zstd file"),
        (b"PAR1\x15", "a Parquet file"),
        (b"PK\x03\x04", "a zip file"),
    ],
)
def test_file_of_another_kind_under_the_name_of_text(tmp_path, begin, words):
    with pytest.raises(DataError, match=re.escape(f"a.jsonl: expected JSON in UTF-8, found {words}")):
        values(write(tmp_path / "a.jsonl", begin))


def test_truncated_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: not readable as Parquet"):
        values(str(path))


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl", "table.csv", "no_files"])
def test_source_that_is_missing_empty_or_of_another_format(tmp_path, name):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "table.csv").touch()
    (tmp_path / "no_files").mkdir()
    with pytest.raises(DataError) as error:
        values(str(tmp_path / name))
    assert name in str(error.value)


def test_linked_directory_in_which_dvc_sees_no_change(tmp_path, monkeypatch):
    """DVC hashes data/raw without what lies behind a link to a directory: with other rows there it would do nothing."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere / "a.jsonl", b'{"prompt":"a"}\n')
    (tmp_path / "data/raw").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    Path("data/raw/linked").symlink_to(elsewhere)
    Path("data/raw/a.jsonl").symlink_to(elsewhere / "a.jsonl")
    for source in ("data/raw/linked", "data/raw/linked/a.jsonl"):
        with pytest.raises(DataError, match="data/raw/linked: a link to a directory, in which DVC would see no change"):
            values(source)
    assert values("data/raw/a.jsonl") == [{"prompt": "a"}]
    shutil.rmtree("data/raw")
    Path("data/raw").symlink_to(elsewhere)
    assert values("data/raw/a.jsonl") == [{"prompt": "a"}]


def test_hash_of_a_file_is_that_of_its_bytes(tmp_path):
    source = write(tmp_path / "a.jsonl", b"{}\n")
    # printf '{}\n' | sha256sum
    assert source_hash(source, []) == "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"


# --- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`datasets` with owner/name served from a local directory: its own loader, no network."""
    import datasets

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "set"
    directory.mkdir()
    for split, texts in (("train", ["a", "b"]), ("test", ["c"])):
        pq.write_table(pa.table({"prompt": texts}), directory / f"{split}.parquet")
    load = datasets.load_dataset
    asked = []

    def local(name, *, revision, split):
        asked.append((name, revision, split))
        return load(str(directory), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    return directory, asked


def test_hub_split_and_revision(hub):
    rows = list(read_rows("hub:owner/some.name@refs/pr/1:train"))
    assert hub[1] == [("owner/some.name", "refs/pr/1", "train")]
    assert [one.values for one in rows] == [{"prompt": "a"}, {"prompt": "b"}]
    assert rows[1].where == "hub:owner/some.name@refs/pr/1:train[train] row 1"
    assert rows[1].source == "hub:owner/some.name@refs/pr/1:train"


def test_hub_without_a_split_reads_all_and_keeps_their_names(hub):
    prompts = [prompt_of(one) for one in read_rows("hub:owner/name")]
    assert [(one.content, one.split) for one in prompts] == [("a", "train"), ("b", "train"), ("c", "eval")]


def test_hub_hash_follows_the_rows(hub):
    train, everything = ("hub:owner/name:train", "hub:owner/name")
    hashes = [source_hash(source, list(read_rows(source))) for source in (train, train, everything)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_hub_split_that_is_neither_train_nor_test(hub):
    (hub[0] / "test.parquet").rename(hub[0] / "validation.parquet")
    assert [one.values["prompt"] for one in read_rows("hub:owner/name:validation")] == ["c"]
    with pytest.raises(DataError, match="cannot be loaded"):
        values("hub:owner/name:sft")


def test_hub_with_splits_of_other_names(monkeypatch):
    import datasets

    parts = {"train_sft": datasets.Dataset.from_dict({"prompt": ["a"]}), "train": datasets.Dataset.from_dict({})}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict(parts))
    with pytest.raises(DataError, match="name the one to read, such as hub:owner/name:train_sft"):
        values("hub:owner/name")


def test_hub_out_of_reach():
    code = "from rlhf_core.ingest.formats import read_rows; list(read_rows('hub:owner/name'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_OFFLINE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "DataError: hub:owner/name: the Hugging Face hub cannot be reached" in done.stderr
    assert "data/raw" in done.stderr


@pytest.mark.parametrize("source", ["hub:", "hub:name", "hub:a/b/c", "hub:a/b@", "hub:a/b:"])
def test_hub_name_that_cannot_be_read(source):
    with pytest.raises(DataError, match=re.escape("expected hub:<owner>/<name>")):
        values(source)


# --- prompts --------------------------------------------------------------------------------------------------------


def test_prompt_shapes():
    turns = [turn("user", "hi")]
    assert prompt_of(row(prompt="hi")).content == "hi"
    assert prompt_of(row(prompt=turns)).content == turns
    assert prompt_of(row(messages=turns)).content == turns
    assert prompt_of(row(prompt=[{**turns[0], "tool_calls": None}])).content == turns
    assert prompt_of(row(prompt=turns, system="be brief")).content == [turn("system", "be brief"), *turns]
    transcript = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: why \n\nAssistant:"
    expected = [turn("user", "hi"), turn("assistant", "yes?"), turn("user", "why")]
    assert prompt_of(row(prompt=transcript)).content == expected


def test_prompt_options():
    prompt = prompt_of(row(prompt="2 + 2?", prompt_id="sums/1", ground_truth={"b": 4, "a": "é"}, split="validation"))
    assert prompt.prompt_id == "sums/1" and prompt.split == "eval"
    assert prompt.ground_truth == '{"a": "é", "b": 4}'
    assert prompt_of(row(prompt="a", id=7)).prompt_id == "7"
    assert prompt_of(row(prompt="a", ground_truth="4")).ground_truth == '"4"'
    assert prompt_of(row(prompt="a", ground_truth=0)).ground_truth == "0"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"question": "a", "answer": "b"}, 'expected {"prompt": text}, {"prompt": [turns]} or'),
        ({"question": "a", "answer": "b"}, "found the keys answer, question: set ingest.prompt_key to one of them"),
        ({"prompt": "a", "messages": [turn("user", "a")]}, "has both prompt and messages"),
        ({"prompt": 3}, "prompt: expected text or a list of turns, found int"),
        ({"prompt": []}, "found an empty list"),
        ({"prompt": ["a"]}, 'prompt[0]: expected {"role": ..., "content": text}, found str'),
        ({"messages": "a"}, "messages: expected text or a list of turns, found str"),
        ({"prompt": [{"from": "human", "value": "a"}]}, "found an object with the keys from, value"),
        ({"prompt": [turn("human", "a")]}, "prompt[0]: expected a role of system, user, assistant, found 'human'"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "prompt[0].content: expected text, found list"),
        ({"prompt": [{**turn("user", "a"), "name": "b"}]}, "only role and content are read, found also name"),
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt": [turn("user", "\t")]}, "the prompt is empty"),
        ({"prompt": "a", "prompt_id": "a b"}, "prompt_id is 'a b': expected only letters, digits"),
        ({"prompt": "a", "id": True}, "id: expected text, found bool"),
        ({"prompt": "a", "split": "dev"}, "split is 'dev': expected one of train, eval, test, validation"),
        ({"prompt": "a", "ground_truth": float("inf")}, "ground_truth: expected a JSON value"),
        ({"prompt": [turn("system", "a"), turn("user", "b")], "system": "c"}, "a system key and a system turn"),
        ({"prompt": "\n\nHuman: a\n\nHuman: b\n\nAssistant:"}, "do not alternate"),
    ],
)
def test_refused_prompt(keys, words):
    with pytest.raises(DataError, match=re.escape(words)) as error:
        prompt_of(row(**keys))
    assert str(error.value).startswith("file:1: ")


def test_keys_of_another_name_are_read():
    given = row(question="2 + 2?", answer="It is 4.", prompt="no", messages="no", ground_truth="no")
    found = prompt_with(given, prompt_key="question", prompt_template=None, ground_truth_key="answer")
    assert (found.content, found.ground_truth) == ("2 + 2?", '"It is 4."')
    given = row(conversation=[turn("user", "hi")])
    assert prompt_of(given, prompt_key="conversation").content == [turn("user", "hi")]
    with pytest.raises(DataError, match="messages: expected text or a list of turns, found str"):
        prompt_of(row(messages="text"), prompt_key="messages")


def test_template_makes_a_user_turn_of_a_text():
    asked = partial(prompt_of, prompt_template="{prompt} {x} {prompt}: \\boxed{}?")
    # Only {prompt} is a place, and what is put into it is not looked at again.
    assert asked(row(prompt="a {prompt} b")).content == [turn("user", "a {prompt} b {x} a {prompt} b: \\boxed{}?")]
    assert asked(row(prompt="a", system="s")).content[0] == turn("system", "s")
    assert asked(row(prompt=[turn("user", "a")])).content == [turn("user", "a")]
    assert asked(row(messages=[turn("user", "a")])).content == [turn("user", "a")]
    assert asked(row(prompt="\n\nHuman: a\n\nAssistant:")).content == [turn("user", "a")]
    with pytest.raises(DataError, match="file:1: the prompt is empty"):
        asked(row(prompt=" "))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"prompt_key": "question"}, "expected the key question; found the keys anser, prompt, qestion (did you mean"),
        ({"prompt_key": "question"}, "(did you mean qestion?): set ingest.prompt_key to one of them"),
        ({"ground_truth_key": "answer"}, "expected the key answer; found the keys anser, prompt, qestion (did you"),
        ({"ground_truth_key": "answer"}, "(did you mean anser?): set ingest.ground_truth_key to one of them"),
        ({"prompt_key": "messages"}, "expected the key messages; found the keys anser, prompt, qestion: set"),
    ],
)
def test_key_that_a_row_lacks_is_named_with_the_nearest(keys, words):
    with pytest.raises(DataError, match=re.escape(words)) as error:
        prompt_of(row(prompt="a", qestion="b", anser="c"), **keys)
    assert str(error.value).startswith("file:1: ")


def test_ground_truth_of_another_key_that_is_no_json():
    with pytest.raises(DataError, match="file:1: answer: expected a JSON value"):
        prompt_of(row(prompt="a", answer=float("nan")), ground_truth_key="answer")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["test.jsonl", "train.jsonl"], ["eval", "train"]),
        (["train-00000-of-00001.jsonl", "validation-00000-of-00001.jsonl"], ["train", "eval"]),
        # One name says nothing of the other side, and neither do names that only begin alike.
        (["train.jsonl", "more.jsonl"], [None, None]),
        (["training.jsonl", "tests.jsonl"], [None, None]),
        (["eval.jsonl", "more.jsonl", "train.jsonl"], ["eval", None, "train"]),
    ],
)
def test_names_of_files_in_a_directory_decide_the_split(tmp_path, names, splits):
    for name in names:
        write(tmp_path / name, json.dumps({"prompt": name}).encode())
    found = {one.content: one.split for one in map(prompt_of, read_rows(str(tmp_path)))}
    assert found == dict(zip(names, splits, strict=True))


def test_split_of_a_row_comes_before_the_name_of_its_file(tmp_path):
    write(tmp_path / "train.jsonl", b'{"prompt":"a","split":"eval"}\n{"prompt":"b"}\n')
    write(tmp_path / "test.jsonl", b'{"prompt":"c"}\n')
    assert {one.content: one.split for one in map(prompt_of, read_rows(str(tmp_path)))} == {
        "a": "eval",
        "b": "train",
        "c": "eval",
    }
    assert [one.values.get("split") for one in read_rows(str(tmp_path / "train.jsonl"))] == ["eval", None]


# --- pairs ----------------------------------------------------------------------------------------------------------


def assert_pair(found, content, chosen, rejected):
    assert isinstance(found, Pair), found
    assert (found.content, found.responses, found.ranks) == (content, [chosen, rejected], [0, 1])


def test_pair_shapes():
    user, good, bad = turn("user", "q"), turn("assistant", "good"), turn("assistant", "bad")
    before = [user, turn("assistant", "a"), turn("user", "more")]
    assert_pair(pair_of(row(prompt="q", chosen=" good", rejected=" bad")), "q", " good", " bad")
    assert_pair(pair_of(row(chosen="q good", rejected="q bad")), "q", " good", " bad")
    assert_pair(pair_of(row(prompt=[user], chosen=[good], rejected=[bad])), [user], "good", "bad")
    assert_pair(pair_of(row(chosen=[*before, good], rejected=[*before, bad])), before, "good", "bad")
    assert_pair(pair_of(row(prompt=[user], chosen="good", rejected="bad")), [user], "good", "bad")
    # As in ultrafeedback_binarized: a text, and conversations that begin with it.
    assert_pair(pair_of(row(prompt="q", chosen=[user, good], rejected=[user, bad])), [user], "good", "bad")
    assert_pair(pair_of(row(prompt="q", chosen=[good], rejected=[bad])), [user], "good", "bad")
    # Turns that both responses share belong to the prompt.
    both = {"chosen": [*before[1:], good], "rejected": [*before[1:], bad]}
    assert_pair(pair_of(row(prompt=[user], **both)), before, "good", "bad")


def test_pair_options():
    pair = pair_of(row(prompt="q", chosen="a", rejected="b", margin=2, split="test", id="x"))
    assert (pair.margin, pair.split, pair.pair_id) == (2.0, "eval", "x")


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("H: hi A: yo H: more? A: yes", "H: hi A: yo H: more? A: no", ("H: hi A: yo H: more? A:", " yes", " no")),
        ("The cat", "The cat sat", ("The cat", "", " sat")),
        ("The ca", "The cat", ("The", " ca", " cat")),
        ("Say it: I think so", "Say it: I thought so", ("Say it: I", " think so", " thought so")),
        ("abc", "xyz", ("", "abc", "xyz")),
        ("abX", "abY", ("", "abX", "abY")),
        ("q\n\n  one", "q\n\n  two", ("q", "\n\n  one", "\n\n  two")),
        (
            "\n\nHuman: a b\n\nAssistant: I am\n\nHuman: c\n\nAssistant: I do",
            "\n\nHuman: a b\n\nAssistant: I am\n\nHuman: c\n\nAssistant: I do not",
            ("\n\nHuman: a b\n\nAssistant: I am\n\nHuman: c\n\nAssistant:", " I do", " I do not"),
        ),
    ],
)
def test_implicit_prompt_of_texts(chosen, rejected, expected):
    """huggingface/trl#1858, #6703: where a shared prompt ends. Prompt and response rebuild the text."""
    prompt, *responses = split_implicit(chosen, rejected)
    assert (prompt, *responses) == expected
    assert [prompt + response for response in responses] == [chosen, rejected]


def test_pair_whose_answers_begin_with_the_prompt_that_is_also_given():
    """A prompt of turns beside whole conversations: put in front once more, the user would ask twice."""
    asked, good, bad = turn("user", "q"), turn("assistant", "a"), turn("assistant", "b")
    whole = pair_of(row(prompt=[asked], chosen=[asked, good], rejected=[asked, bad]))
    assert whole == pair_of(row(prompt=[asked], chosen=[good], rejected=[bad]))
    assert (whole.content, whole.responses) == ([asked], ["a", "b"])
    with pytest.raises(DataError, match="one of chosen and rejected begins with the prompt, the other does not"):
        pair_of(row(prompt=[asked], chosen=[asked, good], rejected=[bad]))


@pytest.mark.parametrize("key", ["question", "instruction", "messages"])
def test_pair_whose_prompt_is_called_something_else(key):
    """Two answers that happen to begin alike would have that beginning as their prompt."""
    with pytest.raises(DataError, match=f"found also {key}: rename that to prompt, or leave it out"):
        pair_of(row(**{key: "Is it so?"}, chosen="Yes, it is so.", rejected="Yes, maybe."))


def test_transcript_becomes_turns():
    start = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: why\n\nAssistant:"
    content = [turn("user", "hi"), turn("assistant", "yes?"), turn("user", "why")]
    assert_pair(pair_of(row(chosen=start + " I know.", rejected=start + " I see. ")), content, "I know.", "I see.")
    assert_pair(pair_of(row(prompt=start, chosen=" I know.", rejected=" No.")), content, "I know.", "No.")


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"chosen": "The cat", "rejected": "The cat sat"}, "empty_response"),
        ({"chosen": "abc", "rejected": "xyz"}, "no_shared_prompt"),
        ({"chosen": " a", "rejected": " b"}, "no_shared_prompt"),
        ({"chosen": "same", "rejected": "same"}, "identical_pair"),
        ({"chosen": "abc", "rejected": ""}, "empty_response"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "empty_response"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "identical_pair"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"}, "empty_response"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"}, "no_shared_prompt"),
        (
            {
                "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
                "rejected": "\n\nHuman: a\n\nAssistant: x",
            },
            "differing_histories",
        ),
        (
            {
                "chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c",
                "rejected": "\n\nHuman: a\n\nHuman: b\n\nAssistant: d",
            },
            "roles_not_alternating",
        ),
        ({"chosen": [turn("user", "q")], "rejected": [turn("user", "q")]}, "identical_pair"),
        ({"chosen": [turn("user", "q")], "rejected": [turn("user", "q"), turn("assistant", "b")]}, "empty_response"),
        ({"chosen": [turn("assistant", "a")], "rejected": [turn("assistant", "b")]}, "no_shared_prompt"),
        (
            {
                "prompt": [turn("user", "q")],
                "chosen": [turn("assistant", "a"), turn("user", "b"), turn("assistant", "c")],
                "rejected": [turn("assistant", "d")],
            },
            "differing_histories",
        ),
        (
            {"prompt": [turn("user", "q")], "chosen": [turn("user", "a")], "rejected": [turn("user", "b")]},
            "differing_histories",
        ),
    ],
)
def test_pair_that_a_rule_leaves_out(keys, rule):
    assert pair_of(row(**keys)) == Refused("file:1", rule)


@pytest.mark.parametrize(
    ("prompt", "content", "responses"),
    [
        ("q", "q", [" a", "b", "c "]),
        ([turn("user", "q")], [turn("user", "q")], [" a", "b", "c "]),
        ("\n\nHuman: q\n\nAssistant:", [turn("user", "q")], ["a", "b", "c"]),
    ],
)
def test_ranked_list(prompt, content, responses):
    found = pair_of(row(prompt=prompt, responses=[" a", "b", "c "], ranks=[7, 2, 7]))
    assert (found.content, found.responses, found.ranks) == (content, responses, [1, 0, 1])


def test_ranked_list_that_a_rule_leaves_out():
    assert pair_of(row(prompt="q", responses=["a", " "], ranks=[0, 1])) == Refused("file:1", "empty_response")
    assert pair_of(row(prompt="q", responses=["a", "a"], ranks=[0, 1])) == Refused("file:1", "identical_pair")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ranks": [0]}, "ranks: expected a list of two or more"),
        ({"responses": "ab"}, "responses: expected a list of two or more"),
        ({"ranks": [0, 1, 2]}, "has 2 responses and 3 ranks"),
        ({"ranks": [0, 0.5]}, "ranks is [0, 0.5]: expected integers"),
        ({"ranks": [0, True]}, "ranks is [0, True]: expected integers"),
        ({"responses": ["a", 1]}, "responses[1]: expected text, found int"),
        ({"responses": ["a", "b", "c"], "ranks": [0, 1, 2], "margin": 1.0}, "margin is about two responses"),
        ({"responses": ["a", "b", "c"], "ranks": [0, 1, 2], "agreement": 1.0}, "agreement is about two responses"),
        ({"chosen": "a"}, "found the keys chosen, prompt, ranks, responses"),
        ({"prompt": " "}, "the prompt is empty"),
    ],
)
def test_refused_ranked_list(keys, words):
    with pytest.raises(DataError, match=re.escape(words)) as error:
        pair_of(row(**{"prompt": "q", "responses": ["a", "b"], "ranks": [0, 1]} | keys))
    assert str(error.value).startswith("file:1: ")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"question": "a", "better": "b"}, 'expected {"prompt", "chosen", "rejected"} or {"chosen", "rejected"}'),
        ({"question": "a", "better": "b"}, "found the keys better, question"),
        ({"prompt": "a", "chosen": "b"}, "found the keys chosen, prompt"),
        ({"chosen": "a", "rejected": [turn("assistant", "b")]}, "both text or both [turns]; found str and list"),
        ({"chosen": True, "rejected": False}, "both text or both [turns]; found bool and bool"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "the prompt is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "agreement": 0.4}, "agreement is 0.4: expected 0.5 to 1"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "agreement": "1"}, "agreement: expected a number, found str"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "agreement": float("nan")}, "agreement is nan"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "2"}, "margin: expected a number, found str"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": True}, "margin: expected a number, found bool"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")}, "expected a finite number"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 10**400}, "expected a finite number"),
        (
            {
                "prompt": "other",
                "chosen": [turn("user", "q"), turn("assistant", "a")],
                "rejected": [turn("user", "q"), turn("assistant", "b")],
            },
            "prompt is no user turn that chosen and rejected share",
        ),
    ],
)
def test_refused_pair(keys, words):
    with pytest.raises(DataError, match=re.escape(words)) as error:
        pair_of(row(**keys))
    assert str(error.value).startswith("file:1: ")


def test_hh_rlhf_harmless(real_data):
    """Counts of a public set of 2,312 transcripts; the text itself is never shown."""
    rows = list(read_rows(str(real_data / "hh_rlhf/harmless-base.test.jsonl.gz")))
    assert len(rows) == 2312
    refused: dict[str, list[int]] = {}
    eaten = 0
    for index, one in enumerate(rows):
        texts = one.values["chosen"], one.values["rejected"]
        prompt, *responses = split_implicit(*texts)
        assert all(prompt + response == text for response, text in zip(responses, texts, strict=True))
        found = pair_of(one)
        if not (isinstance(found, Refused) and found.rule == "differing_histories"):
            # The longest common beginning would take first words of both, past the space before them.
            first, second = (response.removeprefix(" ")[:1] for response in responses)
            eaten += first == second != ""
        if isinstance(found, Refused):
            refused.setdefault(found.rule, []).append(index)
        else:
            roles = [turn["role"] for turn in found.content]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    assert eaten == 444
    # Nine transcripts do not alternate: these four, and the five whose histories differ.
    assert refused == {
        "empty_response": [86, 516, 925, 1103],
        "differing_histories": [1254, 1688, 1950, 1952, 2036],
        "roles_not_alternating": [667, 763, 1319, 1849],
    }
