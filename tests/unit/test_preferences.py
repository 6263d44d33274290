"""Rows to the preferences artifact.

In the tiny tokenizer "hello" is 264, a space 225, "a" 69, "X" 60, "Y" 61, "x" 92; <bos> 1, <eos> 2.

Mutations that must fail here: forget the EOS; cut on the left; compare texts instead of ids after the cut; let pairs of
a prompt fall on both sides; drop a row without counting it.
"""

from functools import partial

import pytest

from rlhf_core.artifacts.schema import PREFERENCES
from rlhf_core.errors import DataError
from rlhf_core.ingest.formats import Row, read_rows
from rlhf_core.ingest.preferences import preferences_table
from rlhf_core.ingest.prompts import prompts_table
from rlhf_core.ingest.rules import PAIR_RULES, PROMPT_RULES, Drops, content_key
from rlhf_core.ingest.shapes import prompt_of
from tests.tiny import tiny_tokenizer

SHARED = {"special_tokens_in_text": "escape", "eval_fraction": 0.5, "fraction": 1.0, "seed": 0}
OPTIONS = {**SHARED, "eos_id": 2, "max_pair_tokens": 100, "other_sides": {}}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def pair(number, prompt, chosen, rejected, **keys):
    return Row(f"f:{number}", "f", {"prompt": prompt, "chosen": chosen, "rejected": rejected, **keys})


def table_of(tokenizer, given, **options):
    drops = Drops("pairs", PAIR_RULES)
    table = preferences_table(given, tokenizer, drops=drops, **(OPTIONS | options))
    return table, {rule: count for rule, count in drops.counts().items() if count}, drops.truncated


def test_columns(tokenizer):
    turns = [{"role": "user", "content": "ab"}]
    given = [
        Row(
            "f:1",
            "f",
            {
                "prompt": turns,
                "chosen": [{"role": "assistant", "content": "x"}],
                "rejected": [{"role": "assistant", "content": "hello"}],
                "margin": 0.5,
                "agreement": 0.75,
                "split": "eval",
                "pair_id": "one",
            },
        ),
        pair(2, "ab", " x", " X"),
    ]
    table, dropped, truncated = table_of(tokenizer, given)
    assert (table.schema, dropped, truncated) == (PREFERENCES, {}, 0)
    first, second = table.to_pylist()
    # fmt: off
    assert first == {
        "pair_id": "one",
        "messages": turns,
        "prompt": "<bos><|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n",
        "prompt_ids": [1, 3, 89, 87, 73, 86, 203, 261, 4, 203, 3, 69, 87, 87, 77, 87, 88, 69, 82, 88, 203],
        "responses": ["x", "hello"],
        "response_ids": [[92, 2], [264, 2]],
        "ranks": [0, 1],
        "margin": 0.5,
        "agreement": 0.75,
        "source": "f",
        "split": "eval",
    }
    # fmt: on
    assert (second["messages"], second["prompt_ids"], second["margin"]) == (None, [1, 261], None)
    assert second["responses"] == [" x", " X"] and second["response_ids"] == [[225, 92, 2], [225, 60, 2]]


@pytest.mark.parametrize(
    ("limit", "chosen", "rejected"),
    [
        (11, [225, *[69] * 6, 60, 2], [225, *[69] * 6, 61, 2]),
        (10, [225, *[69] * 6, 60], [225, *[69] * 6, 61]),
        (9, None, None),
        (8, None, None),
    ],
)
def test_pair_identical_after_truncation(tokenizer, limit, chosen, rejected):
    """OpenRLHF/OpenRLHF#1311: such a pair has loss ln 2 and no gradient. The ids differ in the tenth place."""
    given = [Row("f:1", "f", {"chosen": "hello aaaaaaX", "rejected": "hello aaaaaaY"})]
    table, dropped, truncated = table_of(tokenizer, given, max_pair_tokens=limit)
    if chosen is None:
        assert (table.num_rows, dropped, truncated) == (0, {"identical_after_truncation": 1}, 0)
    else:
        assert table["prompt_ids"].to_pylist() == [[1, 264]]
        assert table["response_ids"].to_pylist() == [[chosen, rejected]]
        assert (dropped, truncated) == ({}, limit == 10)


def test_prompt_that_fills_the_limit_leaves_no_response(tokenizer):
    table, dropped, _ = table_of(tokenizer, [pair(1, "xxxx", "x", "X")], max_pair_tokens=3)
    assert (table.num_rows, dropped) == (0, {"identical_after_truncation": 1})


def test_one_response_cut_the_other_not(tokenizer):
    table, _, truncated = table_of(tokenizer, [pair(1, "x", "X", "XYXY")], max_pair_tokens=4)
    assert table["response_ids"].to_pylist() == [[[60, 2], [60, 61]]] and truncated == 1


def test_counted_rules(tokenizer):
    given = [
        pair(1, "x", "a", "a"),
        pair(2, "x", "a", ""),
        Row("f:3", "f", {"chosen": "abc", "rejected": "xyz"}),
        pair(4, "x", "a", "b"),
        pair(5, "x", "a", "b"),
        pair(6, "x", "b", "a"),
    ]
    table, dropped, _ = table_of(tokenizer, given)
    assert [row["responses"] for row in table.to_pylist()] == [["a", "b"], ["b", "a"]]
    assert dropped == {"identical_pair": 1, "empty_response": 1, "no_shared_prompt": 1, "duplicate_pair": 1}


def test_ids(tokenizer):
    given = [pair(1, "x", "a", "b"), pair(2, "x", "b", "a"), pair(3, "x", "a", "c", id="mine")]
    ids = table_of(tokenizer, given)[0]["pair_id"].to_pylist()
    assert ids[2] == "mine" and len(set(ids)) == 3
    assert all(one.startswith("q") and len(one) == 13 for one in ids[:2])
    assert table_of(tokenizer, given[1::-1])[0]["pair_id"].to_pylist() == ids[1::-1]
    with pytest.raises(DataError, match="f:4: pair_id 'mine' is taken by another pair, at f:3"):
        table_of(tokenizer, [*given, pair(4, "y", "a", "c", id="mine")])


def test_special_tokens_in_text(tokenizer):
    given = [pair(1, "x", "a", "b"), pair(2, "y", "a", "x<eos>"), pair(3, "<pad>", "a", "b")]
    table, _, _ = table_of(tokenizer, given)
    assert table["response_ids"][1].as_py() == [[69, 2], [92, 32, 73, 83, 87, 34, 2]]
    assert table["prompt_ids"][2].as_py() == [1, 32, 84, 69, 72, 34]
    table, dropped, _ = table_of(tokenizer, given, special_tokens_in_text="drop")
    assert (table.num_rows, dropped) == (1, {"special_tokens_in_pair": 2})
    with pytest.raises(DataError, match="f:2: the text contains the special token '<eos>'"):
        table_of(tokenizer, given, special_tokens_in_text="error")


def test_ranked_lists(tokenizer):
    rows = [
        Row("f:1", "f", {"prompt": "ab", "responses": ["x", "hello", "X"], "ranks": [1, 0, 1]}),
        Row("f:2", "f", {"prompt": "ab", "responses": ["x", "hello", "X"], "ranks": [1, 0, 1]}),
        Row("f:3", "f", {"prompt": "ab", "responses": ["x", "hello", "X"], "ranks": [0, 1, 2]}),  # other ranks
        Row("f:4", "f", {"prompt": "ab", "responses": ["aaX", "aaY", "aaZ"], "ranks": [0, 1, 2]}),
        Row("f:5", "f", {"prompt": "ab", "responses": ["x", "X"], "ranks": [0, 0]}),
    ]
    table, dropped, _ = table_of(tokenizer, rows, max_pair_tokens=4)  # <bos> ab and two ids
    assert dropped == {"duplicate_pair": 1, "identical_after_truncation": 1}
    assert [row["ranks"] for row in table.to_pylist()] == [[1, 0, 1], [0, 1, 2], [0, 0]]
    assert table["response_ids"][0].as_py() == [[92, 2], [264, 2], [60, 2]]
    assert len(set(table["pair_id"].to_pylist())) == 3


def test_pairs_of_a_prompt_stay_together(tokenizer):
    given = [pair(index, f"x{index // 4}", f"a{index}", "b") for index in range(400)]
    for fraction in (1.0, 0.2):
        rows = table_of(tokenizer, given, fraction=fraction)[0].to_pylist()
        sides: dict[str, list[str]] = {}
        for row in rows:
            sides.setdefault(row["prompt"], []).append(row["split"])
        assert all(len(found) == 4 and len(set(found)) == 1 for found in sides.values())
        assert {side for found in sides.values() for side in found} == {"train", "eval"}


def test_prompts_and_preferences_agree(tokenizer):
    """The same prompts, split and thinned out alike, though the two files do not know each other."""
    texts = [f"x{index}" for index in range(100)]
    drops = Drops("prompts", PROMPT_RULES)
    given = [Row("f", "f", {"prompt": text}) for text in texts]
    options = {**SHARED, "fraction": 0.3, "max_prompt_tokens": 9, "too_long": "error", "drops": drops}
    read = partial(prompt_of, prompt_key="prompt", prompt_template=None, ground_truth_key="ground_truth")
    prompts, sides = prompts_table(given, tokenizer, read=read, **options)
    given = [pair(1, text, "a", "b") for text in texts]
    pairs, dropped, _ = table_of(tokenizer, given, other_sides=sides, fraction=0.3)
    assert dropped == {}
    assert [(row["prompt"], row["split"]) for row in pairs.to_pylist()] == [
        (row["prompt"], row["split"]) for row in prompts.to_pylist()
    ]


def test_own_split_of_a_prompt_on_both_sides(tokenizer):
    given = [
        pair(1, "x", "a", "b", split="train"),
        pair(2, "x", "c", "d", split="test"),
        pair(3, "x", "e", "f"),
    ]
    table, dropped, _ = table_of(tokenizer, given)
    assert [(row["responses"][0], row["split"]) for row in table.to_pylist()] == [("a", "train"), ("e", "train")]
    assert dropped == {"prompt_on_both_sides": 1}


def test_prompt_that_is_held_out_in_the_prompts(tokenizer):
    given = [pair(1, "x", "a", "b", split="train"), pair(2, "y", "a", "b", split="train")]
    table, dropped, _ = table_of(tokenizer, given, other_sides={content_key("x"): "eval", content_key("y"): "train"})
    assert table["prompt"].to_pylist() == ["y"]
    assert dropped == {"prompt_on_other_side": 1}


def test_hh_rlhf_harmless(tokenizer, real_data):
    """Every row of a public set is in the artifact or counted; two prompts occur twice."""
    rows = list(read_rows(str(real_data / "hh_rlhf/harmless-base.test.jsonl.gz")))
    table, dropped, truncated = table_of(tokenizer, rows, max_pair_tokens=100_000)
    assert dropped == {"empty_response": 4, "differing_histories": 5, "roles_not_alternating": 4}
    assert (table.num_rows, truncated) == (2312 - 13, 0)
    assert len(set(table["prompt"].to_pylist())) == table.num_rows - 2
