"""benchmarks/: public data in ingest's shapes, what a reward model has to beat, and the whole on a tiny model.

Mutations that must fail here: the side chosen by prompt within a tree; ranks reversed; a tied vote given to a response;
the shorter response called the longer; training texts among the measured ones.
"""

import contextlib
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import floors, reward_model
from benchmarks.preference_data import FILES, convert, latest_turns, oasst, pandalm
from rlhf_core.errors import ConfigError, DataError
from stages import base_model, ingest, train_rm

TREE = {
    "message_tree_id": "t1",
    "prompt": {
        "message_id": "m0",
        "role": "prompter",
        "text": "Hi",
        "replies": [
            {
                "message_id": "m1",
                "role": "assistant",
                "text": "Hello",
                "rank": 1,
                "replies": [
                    {
                        "message_id": "m4",
                        "role": "prompter",
                        "text": "More",
                        "replies": [
                            {"message_id": "m5", "role": "assistant", "text": "x", "rank": 0, "replies": []},
                            {"message_id": "m6", "role": "assistant", "text": "y", "rank": 1},
                            {"message_id": "m7", "role": "assistant", "text": "z", "rank": 2, "deleted": True},
                        ],
                    }
                ],
            },
            {"message_id": "m2", "role": "assistant", "text": "Hey", "rank": 0, "replies": []},
            {"message_id": "m3", "role": "assistant", "text": "?", "rank": None, "replies": []},
        ],
    },
}
PAIR = {"instruction": "Add", "input": "1 2", "response1": "3", "response2": "4"}


def votes(*given: int, **changed: Any) -> dict[str, Any]:
    return {**PAIR, **{f"annotator{number}": vote for number, vote in enumerate(given, 1)}, **changed}


def test_a_tree_becomes_a_ranked_list_for_each_user_turn() -> None:
    first, second = oasst(TREE, eval_fraction=0.5, seed=0)
    assert first["prompt"] == [{"role": "user", "content": "Hi"}]
    # The reply without a rank and the deleted one are left out.
    assert (first["responses"], first["ranks"], first["pair_id"]) == (["Hello", "Hey"], [1, 0], "t1:m0")
    assert [turn["content"] for turn in second["prompt"]] == ["Hi", "Hello", "More"]
    assert [turn["role"] for turn in second["prompt"]] == ["user", "assistant", "user"]
    assert (second["responses"], second["ranks"], second["pair_id"]) == (["x", "y"], [0, 1], "t1:m4")


def test_a_tree_is_on_one_side() -> None:
    sides = set()
    for number in range(40):
        both = list(oasst({**TREE, "message_tree_id": f"t{number}"}, eval_fraction=0.5, seed=0))
        assert both[0]["split"] == both[1]["split"]
        sides.add(both[0]["split"])
    assert sides == {"train", "eval"}


@pytest.mark.parametrize(
    "given, chosen, agreement",
    [
        ((1, 1, 1), "3", 1.0),
        ((2, 1, 2), "4", 2 / 3),
        ((0, 2, 2), "4", 2.5 / 3),  # a vote for a tie is half a vote for each
    ],
)
def test_three_votes_become_a_pair_with_agreement(given, chosen, agreement) -> None:
    row = pandalm(votes(*given))
    assert row is not None
    assert row["prompt"] == [{"role": "user", "content": "Add\n\n1 2"}]
    assert (row["chosen"], row["rejected"]) == (chosen, "34".replace(chosen, ""))
    assert row["agreement"] == pytest.approx(agreement)


@pytest.mark.parametrize("given", [(0, 0, 0), (0, 0, 1), (0, 1, 2)])
def test_without_a_majority_for_one_response_they_are_tied(given) -> None:
    row = pandalm(votes(*given))
    assert row is not None
    assert (row["responses"], row["ranks"]) == (["3", "4"], [0, 0])


def test_a_response_that_is_no_text_is_left_out_and_an_empty_input_adds_nothing() -> None:
    assert pandalm(votes(1, 1, 1, response2=True)) is None
    row = pandalm(votes(1, 1, 1, input=""))
    assert row is not None and row["prompt"][0]["content"] == "Add"


def test_the_latest_turns_begin_with_the_user_s() -> None:
    turns = [{"role": role, "content": "a b"} for role in ("user", "assistant", "user", "assistant", "user")]
    assert latest_turns(turns, 0) == latest_turns(turns, 5) == turns[4:]
    assert latest_turns(turns, 6) == latest_turns(turns, 9) == turns[2:]
    assert latest_turns(turns, 10) == turns


def write_hh(data: Path, count: int) -> None:
    """Transcripts whose better reply says good, and one row without a shared prompt."""
    path = data / FILES["hh_rlhf"]
    path.parent.mkdir(parents=True)
    rows = [
        {
            "chosen": f"\n\nHuman: q\n\nAssistant: a\n\nHuman: {index}\n\nAssistant: good {'x' * (index % 3)}",
            "rejected": f"\n\nHuman: q\n\nAssistant: a\n\nHuman: {index}\n\nAssistant: bad one",
        }
        for index in range(count)
    ]
    with gzip.open(path, "wt") as handle:
        for row in [*rows, {"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: b"}]:
            handle.write(json.dumps(row) + "\n")


def test_cutting_the_history_changes_no_side(tmp_path) -> None:
    write_hh(tmp_path, 30)
    found = {}
    for words in (None, 0):
        options = {"history_words": words, "system": None, "eval_fraction": 0.3, "seed": 1}
        convert("hh_rlhf", tmp_path, tmp_path / "out.jsonl", **options)
        found[words] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    whole, cut = found[None], found[0]
    assert [row.get("split") for row in whole] == [row.get("split") for row in cut]
    assert {row.get("split") for row in whole} == {"train", "eval", None}
    assert [len(row["prompt"]) for row in whole[:30]] == [3] * 30
    assert cut[7]["prompt"] == [{"role": "user", "content": "7"}] and cut[7]["chosen"] == "good x"
    assert whole[30] == cut[30] == {"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: b"}


def test_missing_data_and_settings_of_another_form_are_named(tmp_path) -> None:
    with pytest.raises(DataError, match="holds oasst/en_100_tree"):
        convert("oasst", tmp_path, tmp_path / "x.jsonl", history_words=None, system=None, eval_fraction=0.2, seed=0)
    assert reward_model.setting("train_rm.learning_rate=1e-4") == ("train_rm.learning_rate", 1e-4)
    for wrong in ("train_rm.epochs", "epochs=2", "train_rm.epochs=[2"):
        with pytest.raises(ConfigError, match="--set"):
            reward_model.setting(wrong)


def test_a_missing_library_is_named_before_anything_runs(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"benchmarks/requirements\.txt"):
        floors.scikit_learn()


def test_the_floor_learns_words_of_the_training_pairs() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is no requirement of the project")
    train = [(f"good {chr(97 + index)}", f"bad {chr(97 + index)}") for index in range(8)]
    margins = floors.words(train, [("good z", "bad z"), ("bad y", "good y"), ("new", "words")])
    assert margins[0] > 0 > margins[1] == -margins[0] and margins[2] == 0


def test_the_whole_on_a_tiny_model(tmp_path, tiny_dir) -> None:
    write_hh(tmp_path / "data", 40)
    work = tmp_path / "work"
    changes = {"base_model.source": str(tiny_dir), "train_rm.frozen_layers": 0, "train_rm.learning_rate": 1e-2}
    changes |= {"train_rm.batch_size": 4, "compute.precision": "float32"}
    reward_model.build("hh_rlhf", tmp_path / "data", work, changes, 0, "")
    with contextlib.chdir(work):
        for stage in (base_model, ingest, train_rm):
            stage.main()
    result = reward_model.measured(work, floor=False)
    held_out = floors.read_pairs(work / "data/preferences", "eval")
    assert result["held_out_pairs"] == len(held_out.names) == result["ingest"]["pairs/eval"] > 3
    assert result["pairs"] + result["held_out_pairs"] == 40 and result["ingest"]["dropped/empty_response"] == 1
    assert result["accuracy"]["reward model"][0] == result["train_rm"]["eval/accuracy"] == 1.0
    # With its EOS, good is 5 ids, good x 7, good xx 8, and bad one 8.
    tokens = np.array(held_out.tokens)
    assert set(map(tuple, tokens)) <= {(5, 8), (7, 8), (8, 8)}
    half = result["accuracy"]["shorter response"][0]
    assert half == pytest.approx(np.mean(tokens[:, 0] < 8) + np.mean(tokens[:, 0] == 8) / 2)
    assert result["accuracy"]["longer response"][0] == pytest.approx(1 - half)
    assert result["reward_model_minus"]["shorter response"][0] == pytest.approx(1 - half)
    text = reward_model.table(result)
    assert "| reward model | 100.0% | 100.0% to 100.0% |  |  |" in text and text.count("\n") == 6
