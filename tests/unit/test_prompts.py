"""Rows to the prompts artifact, and the rules of splitting and thinning out.

In the tiny tokenizer plain text of n characters without merges has n + 1 ids, the BOS included.

Mutations that must fail here: split by row instead of by content; the seed not used; a duplicate kept; an id reused;
the BOS cut off; the fraction not nested, or leaving one side empty; length measured in characters.
"""

import json
import re
from functools import partial

import pytest

from rlhf_core.artifacts.schema import PROMPTS
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ingest.formats import Row
from rlhf_core.ingest.prompts import prompts_table, short_hash
from rlhf_core.ingest.rules import (
    PAIR_RULES,
    PROMPT_RULES,
    Drops,
    content_key,
    ingest_metrics,
    kept_keys,
    require_both_sides,
    side_of,
)
from rlhf_core.ingest.shapes import prompt_of
from tests.tiny import tiny_tokenizer

OPTIONS = {
    "read": partial(prompt_of, prompt_key="prompt", prompt_template=None, ground_truth_key="ground_truth"),
    "max_prompt_tokens": 100,
    "too_long": "error",
    "special_tokens_in_text": "escape",
    "eval_fraction": 0.5,
    "fraction": 1.0,
    "seed": 0,
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def rows(*contents, **keys):
    return [Row(f"f:{number}", "f", {"prompt": text, **keys}) for number, text in enumerate(contents, start=1)]


def table_of(tokenizer, given, **options):
    drops = Drops("prompts", PROMPT_RULES)
    table, sides = prompts_table(given, tokenizer, drops=drops, **(OPTIONS | options))
    return table, sides, drops


def test_columns(tokenizer):
    turns = [{"role": "user", "content": "ab"}]
    given = [
        Row("f:1", "f", {"prompt": turns, "id": "one", "split": "test", "ground_truth": [1]}),
        Row("f:2", "f", {"prompt": "ab", "split": "train"}),
    ]
    table, _, _ = table_of(tokenizer, given)
    assert table.schema == PROMPTS
    first, second = table.to_pylist()
    # fmt: off
    assert first == {
        "prompt_id": "one",
        "messages": turns,
        "prompt": "<bos><|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n",
        "prompt_ids": [1, 3, 89, 87, 73, 86, 203, 261, 4, 203, 3, 69, 87, 87, 77, 87, 88, 69, 82, 88, 203],
        "ground_truth": "[1]",
        "source": "f",
        "split": "eval",
    }
    # fmt: on
    assert (second["messages"], second["prompt"], second["prompt_ids"]) == (None, "ab", [1, 261])
    assert (second["ground_truth"], second["split"]) == (None, "train")


def test_text_survives_as_it_is(tokenizer):
    text = "a\u2028b\u0085c\r\nd\x00é😀"
    assert table_of(tokenizer, rows(text))[0]["prompt"].to_pylist() == [text]


def test_ids_are_stable_unique_and_of_the_content(tokenizer):
    ids = table_of(tokenizer, rows("x", "y", "z"))[0]["prompt_id"].to_pylist()
    # printf '"x"' | sha256sum
    assert ids[0] == "pba2df4903a2c"
    assert len(set(ids)) == 3
    assert table_of(tokenizer, rows("z", "x"))[0]["prompt_id"].to_pylist() == [ids[2], ids[0]]


def test_text_and_a_turn_of_the_same_text_are_two_prompts(tokenizer):
    given = [*rows("ab"), Row("f:2", "f", {"prompt": [{"role": "user", "content": "ab"}]})]
    assert table_of(tokenizer, given)[0].num_rows == 2


def test_short_hash_grows_when_it_is_taken():
    digest = "0123456789abcdef" * 4
    assert short_hash("p", digest, set()) == "p0123456789ab"
    assert short_hash("p", digest, {"p0123456789ab"}) == "p0123456789abcdef"


def test_id_made_here_avoids_one_that_a_later_row_has(tokenizer):
    given = [*rows("x"), Row("f:2", "f", {"prompt": "y", "id": "pba2df4903a2c"})]
    assert table_of(tokenizer, given)[0]["prompt_id"].to_pylist() == ["pba2df4903a2c14e8", "pba2df4903a2c"]


def test_prompt_that_comes_again_is_kept_once(tokenizer):
    table, _, drops = table_of(tokenizer, rows("x", "y", "x", "x"))
    assert table["prompt"].to_pylist() == ["x", "y"]
    assert drops.counts() == {"duplicate_prompt": 2, "prompt_too_long": 0, "special_tokens_in_prompt": 0}


def test_prompt_on_both_sides_of_a_given_split_stays_on_the_first(tokenizer):
    given = [*rows("x", split="train"), *rows("x", split="eval")]
    assert table_of(tokenizer, given)[0]["split"].to_pylist() == ["train"]


def test_one_id_for_two_prompts(tokenizer):
    given = [Row("f:1", "f", {"prompt": "x", "id": "a"}), Row("f:9", "f", {"prompt": "y", "id": "a"})]
    with pytest.raises(DataError, match="f:9: prompt_id 'a' is taken by another prompt, at f:1"):
        table_of(tokenizer, given)


def test_empty_prompt_stops(tokenizer):
    with pytest.raises(DataError, match="f:2: the prompt is empty"):
        table_of(tokenizer, rows("x", "  "))


def test_errors_of_the_tokenizer_name_the_row(tokenizer):
    given = [*rows("x"), Row("f:2", "f", {"messages": [{"role": "assistant", "content": "x"}]})]
    with pytest.raises(DataError, match="f:2: the conversation ends in a turn of the assistant"):
        table_of(tokenizer, given)


# "xyxyxy" has 7 ids.


def test_limit_counts_the_ids_that_are_sent(tokenizer):
    table, _, _ = table_of(tokenizer, rows("xyxyxy"), max_prompt_tokens=7)
    assert len(table["prompt_ids"][0]) == 7
    with pytest.raises(DataError, match=re.escape("f:2: the prompt has 8 tokens; ingest.max_prompt_tokens is 7")):
        table_of(tokenizer, rows("xyxyxy", "xyxyxyx"), max_prompt_tokens=7)


def test_prompt_that_is_too_long_is_dropped_and_counted(tokenizer):
    table, _, drops = table_of(tokenizer, rows("x", "xyxyxy"), max_prompt_tokens=6, too_long="drop")
    assert table["prompt"].to_pylist() == ["x"]
    assert drops.counts()["prompt_too_long"] == 1


def test_prompt_that_is_cut_on_the_left_keeps_its_bos(tokenizer):
    table, _, drops = table_of(tokenizer, rows("x", "vwxy"), max_prompt_tokens=3, too_long="truncate_left")
    assert table["prompt_ids"].to_pylist() == [[1, 92], [1, 92, 93]]
    assert table["prompt"].to_pylist() == ["x", "<bos>xy"]
    assert (drops.truncated, drops.counts()["prompt_too_long"]) == (1, 0)


def test_prompt_without_bos_that_is_cut_on_the_left():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    table, _, _ = table_of(tokenizer, rows("vwxy"), max_prompt_tokens=3, too_long="truncate_left")
    assert table["prompt_ids"].to_pylist() == [[91, 92, 93]]


def test_special_tokens_in_text(tokenizer):
    given = rows("x", "x<eos>")
    assert table_of(tokenizer, given)[0]["prompt_ids"][1].as_py() == [1, 92, 32, 73, 83, 87, 34]
    table, _, drops = table_of(tokenizer, given, special_tokens_in_text="drop")
    assert table["prompt"].to_pylist() == ["x"]
    assert drops.counts()["special_tokens_in_prompt"] == 1
    with pytest.raises(DataError, match="f:2: the text contains the special token '<eos>'"):
        table_of(tokenizer, given, special_tokens_in_text="error")


def test_split_depends_on_content_and_seed_only(tokenizer):
    texts = [f"x{index}" for index in range(400)]
    one = dict(zip(texts, table_of(tokenizer, rows(*texts))[0]["split"].to_pylist(), strict=True))
    other = table_of(tokenizer, rows(*texts[::-1]))[0]
    assert dict(zip(texts[::-1], other["split"].to_pylist(), strict=True)) == one
    assert list(table_of(tokenizer, rows(*texts), seed=1)[0]["split"].to_pylist()) != list(one.values())
    # Binomial(400, 0.5): 160 to 240 are 4 standard deviations.
    assert 160 < list(one.values()).count("eval") < 240
    few = table_of(tokenizer, rows(*texts), eval_fraction=0.1)[0]["split"].to_pylist()
    # A smaller fraction holds out a part of the same prompts. Binomial(400, 0.1): 4 standard deviations are 24.
    assert 16 < few.count("eval") < 64
    assert all(one[text] == "eval" for text, side in zip(texts, few, strict=True) if side == "eval")


def test_own_split_wins(tokenizer):
    texts = [f"x{index}" for index in range(50)]
    assert set(table_of(tokenizer, rows(*texts, split="validation"))[0]["split"].to_pylist()) == {"eval"}


def test_fraction_is_nested_and_leaves_both_sides(tokenizer):
    texts = [f"x{index}" for index in range(400)]
    whole = table_of(tokenizer, rows(*texts))[0]["prompt_id"].to_pylist()
    kept = {}
    for fraction in (0.5, 0.1, 0.0001):
        table, sides, _ = table_of(tokenizer, rows(*texts), fraction=fraction)
        kept[fraction] = table["prompt_id"].to_pylist()
        assert kept[fraction] == [one for one in whole if one in set(kept[fraction])]  # the order of the file
        assert len(sides) == 400
    # What is kept does not depend on the side: half of 200 on each, 4 standard deviations are 28.
    half = table_of(tokenizer, rows(*texts), fraction=0.5)[0]["split"].to_pylist()
    assert 60 < half.count("eval") < 140 and 60 < half.count("train") < 140
    assert 160 < len(kept[0.5]) < 240 and 16 < len(kept[0.1]) < 64
    assert set(kept[0.0001]) <= set(kept[0.1]) <= set(kept[0.5])
    table, _, _ = table_of(tokenizer, rows(*texts), fraction=0.0001)
    assert sorted(table["split"].to_pylist()) == ["eval", "train"]


def test_fraction_cannot_conjure_up_a_side():
    assert len(kept_keys({"a": "train", "b": "train"}, fraction=1e-9, seed=0)) == 1


def test_content_key():
    # printf '[["user", "a"]]' | sha256sum
    assert content_key([{"role": "user", "content": "a"}]).startswith("050d8ef56e88")
    assert content_key("a") != content_key("a ") != content_key([{"role": "user", "content": "a"}])


def test_side_of_is_split_by_the_hash():
    sides = [side_of(content_key(str(index)), eval_fraction=0.2, seed=3) for index in range(2000)]
    assert 330 < sides.count("eval") < 470  # 400, 4 standard deviations are 72


@pytest.mark.parametrize("side", ["train", "eval"])
def test_nothing_left_on_one_side(tokenizer, side):
    table, _, drops = table_of(tokenizer, rows("x", "y", "x", split=side))
    counts = {"train": "2 train and 0 eval", "eval": "0 train and 2 eval"}[side]
    with pytest.raises(ConfigError, match=f"data/raw/p.jsonl: {counts} prompts are left .dropped: duplicate_prompt 1"):
        require_both_sides(table, drops, source="data/raw/p.jsonl")


def test_log_names_rule_and_first_positions(caplog):
    drops = Drops("pairs", PAIR_RULES)
    for number in range(7):
        drops.add("empty_response", f"f:{number}")
    drops.truncated = 2
    with caplog.at_level("INFO", logger="rlhf"):
        drops.log()
    assert caplog.messages == [
        "dropped 7 pairs (empty_response): f:0, f:1, f:2, f:3, f:4, ...",
        "cut 2 pairs to the token limit",
    ]


def test_metrics(tokenizer):
    table, _, drops = table_of(tokenizer, [*rows("x", "y", split="train"), *rows("z", "x", split="eval")])
    metrics = ingest_metrics(table, drops, table.slice(0, 0), Drops("pairs", PAIR_RULES))
    assert json.loads(json.dumps(metrics)) == {
        "prompts/train": 2,
        "prompts/eval": 1,
        "pairs/train": 0,
        "pairs/eval": 0,
        "truncated/prompts": 0,
        "truncated/pairs": 0,
        **{f"dropped/{rule}": 0 for rule in (*PROMPT_RULES, *PAIR_RULES)},
        "dropped/duplicate_prompt": 1,
    }


def test_warns_of_a_template_with_the_date(caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if false %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    with caplog.at_level("WARNING", logger="rlhf"):
        table_of(tokenizer, rows("x"))
    assert "today's date" in caplog.text
