"""Public preference data as rows that ingest reads (docs/data.md).

hh_rlhf stays text and turns; oasst's trees become ranked lists, pandalm's three votes become pairs with agreement.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.ingest.formats import Row
from rlhf_core.ingest.rules import content_key, side_of
from rlhf_core.ingest.shapes import Refused, pair_of

FILES = {
    "hh_rlhf": "hh_rlhf/harmless-base.test.jsonl.gz",
    "oasst": "oasst/en_100_tree.jsonl",
    "pandalm": "pandalm/testset-v1.json",
}
_ROLES = {"prompter": "user", "assistant": "assistant"}

Json = dict[str, Any]


def convert(
    name: str,
    data: Path,
    out: Path,
    *,
    history_words: int | None,
    system: str | None,
    eval_fraction: float,
    seed: int,
) -> None:
    """Write one of FILES as JSON lines for `ingest.preferences`.

    Args:
        name: Of FILES.
        data: Directory with the data sets.
        out: Written; ends in .jsonl.
        history_words: Of a conversation, only the latest turns with at most so many words altogether, at least the last
            one; None = whole conversations. Which rows are held out does not depend on it.
        system: System turn of every conversation; None = none, so that a chat template writes its own.
        eval_fraction: ingest.eval_fraction, where the converter has to choose the side.
        seed: The run's seed.

    Raises:
        DataError: If the file is missing.
    """
    path = data / FILES[name]
    if not path.is_file():
        raise DataError(f"{path}: no such file; --data names a directory that holds {FILES[name]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    if name == "hh_rlhf":
        rows = hh_rlhf(path, eval_fraction=eval_fraction, seed=seed)
    elif name == "oasst":
        trees = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        rows = (row for tree in trees for row in oasst(tree, eval_fraction=eval_fraction, seed=seed))
    else:
        rows = (row for row in map(pandalm, json.loads(path.read_text(encoding="utf-8"))) if row is not None)
    with out.open("w", encoding="utf-8") as handle:
        for row in rows:
            if history_words is not None and "prompt" in row:
                row = {**row, "prompt": latest_turns(row["prompt"], history_words)}
            if system is not None and "prompt" in row:
                row = {**row, "system": system}
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")


def hh_rlhf(path: Path, *, eval_fraction: float, seed: int) -> Iterator[Json]:
    """Yield transcripts as turns, with the side that ingest gives to the whole conversation.

    A row that ingest would leave out is passed on as it is, for ingest to count.
    """
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            values = json.loads(line)
            pair = pair_of(Row(f"{path.name}:{number}", path.name, values))
            if isinstance(pair, Refused):
                yield values
                continue
            chosen, rejected = pair.responses
            side = side_of(content_key(pair.content), eval_fraction=eval_fraction, seed=seed)
            yield {"prompt": pair.content, "chosen": chosen, "rejected": rejected, "split": side}


def oasst(tree: Json, *, eval_fraction: float, seed: int) -> Iterator[Json]:
    """Yield a ranked list for every user turn of a tree with two or more ranked replies.

    Later prompts of a tree contain replies that earlier lists rank, so a whole tree is on one side, and pair_id begins
    with its name.

    Args:
        tree: {"message_tree_id", "prompt": node}; a node has message_id, role, text and replies, a reply of the
            assistant a rank.
        eval_fraction: Part of the trees held out.
        seed: Of that choice.
    """
    side = side_of(tree["message_tree_id"], eval_fraction=eval_fraction, seed=seed)
    open_nodes: list[tuple[Json, list[Json]]] = [(tree["prompt"], [])]
    while open_nodes:
        node, before = open_nodes.pop()
        turns = [*before, {"role": _ROLES[node["role"]], "content": node["text"]}]
        replies = [reply for reply in node.get("replies", []) if not reply.get("deleted")]
        open_nodes += [(reply, turns) for reply in reversed(replies)]
        ranked = [reply for reply in replies if reply["role"] == "assistant" and reply.get("rank") is not None]
        if len(ranked) > 1:
            texts, ranks = [reply["text"] for reply in ranked], [reply["rank"] for reply in ranked]
            name = f"{tree['message_tree_id']}:{node['message_id']}"
            yield {"pair_id": name, "prompt": turns, "responses": texts, "ranks": ranks, "split": side}


def pandalm(row: Json) -> Json | None:
    """Return a pair with its annotators' agreement, or a tied list of two; None where a response is no text.

        agreement = (votes for the better response + half the votes for a tie) / votes

    Args:
        row: instruction, input, response1, response2, annotator1 to annotator3 (0 tie, 1, 2).
    """
    responses = [row["response1"], row["response2"]]
    if not all(isinstance(text, str) for text in responses):
        return None  # JSON booleans: what the model wrote is lost
    votes = [row[f"annotator{number}"] for number in (1, 2, 3)]
    text = "\n\n".join(part for part in (row["instruction"], row["input"]) if part)
    prompt = [{"role": "user", "content": text}]
    count = [votes.count(vote) for vote in (0, 1, 2)]
    winner = count.index(max(count))
    if winner == 0 or count[1] == count[2]:
        return {"prompt": prompt, "responses": responses, "ranks": [0, 0]}
    chosen, rejected = responses if winner == 1 else reversed(responses)
    agreement = (count[winner] + count[0] / 2) / len(votes)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "agreement": agreement}


def latest_turns(turns: list[Json], words: int) -> list[Json]:
    """Return the latest turns of a conversation that begin with the user's and have at most so many words altogether.

    The last turn always stays.
    """
    kept, first = 0, len(turns) - 1
    for place in range(len(turns) - 1, -1, -1):
        kept += len(turns[place]["content"].split())
        if kept > words:
            break
        first = place if turns[place]["role"] == "user" else first
    return turns[first:]
