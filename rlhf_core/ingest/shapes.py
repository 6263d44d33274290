"""What the keys of a row mean: TRL's prompt-only and preference formats, standard (text) and conversational (turns).

Text is used as it is; turns are rendered with the chat template later. A transcript in the style of hh-rlhf
("\\n\\nHuman: ...\\n\\nAssistant: ...") is read as turns. What fits no shape is refused with the keys that were found.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.ingest import fields
from rlhf_core.ingest.fields import Content, Message
from rlhf_core.ingest.formats import Row

PROMPT_KEY, GROUND_TRUTH_KEY = "prompt", "ground_truth"  # what these keys are called unless ingest names others
PROMPT_PLACE = "{prompt}"  # of a template
PROMPT_SHAPES = '{"prompt": text}, {"prompt": [turns]} or {"messages": [turns]}'
PAIR_SHAPES = (
    '{"prompt", "chosen", "rejected"} or {"chosen", "rejected"}, each text or [turns], or'
    ' {"prompt", "responses": [texts], "ranks": [integers]}'
)

# What data sets call a prompt that is not called prompt: the common beginning of two answers would be taken for it.
_OTHER_PROMPTS = ("question", "instruction", "query", "input", "messages", "conversation", "conversations", "history")
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_MARKER = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of a prompt file."""

    where: str
    source: str
    content: Content
    prompt_id: str | None
    ground_truth: str | None
    """JSON text."""
    split: str | None
    """train | eval; None where the row has none of its own."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A row of a preference file: two responses, or a longer ranked list."""

    where: str
    source: str
    content: Content
    """The shared prompt."""
    responses: list[str]
    ranks: list[int]
    """One for each response, 0 = best, without gaps; equal = tied."""
    pair_id: str | None
    margin: float | None
    agreement: float | None
    split: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that a counted rule leaves out."""

    where: str
    rule: str


def prompt_of(row: Row, *, prompt_key: str, prompt_template: str | None, ground_truth_key: str) -> Prompt:
    """Read a row as a prompt.

    Args:
        row: With `prompt` (text or turns) or `messages` (turns); optional `system`, `prompt_id` or `id`, `ground_truth`
            (any JSON), `split`. Other keys are not looked at.
        prompt_key: Where the prompt is. Another one than PROMPT_KEY has to be there; `messages` then counts as any key.
        prompt_template: With PROMPT_PLACE: a text prompt becomes one user turn of this text, itself in that place,
            where the template may have it several times. Turns, and transcripts, stay as they are. None = no template.
        ground_truth_key: Where the ground truth is. Another one than GROUND_TRUTH_KEY has to be there.

    Raises:
        DataError: If a key is missing, has another type, or the prompt is empty; with the row's position.
    """
    values, where = row.values, row.where
    key = prompt_key
    if key == PROMPT_KEY and "messages" in values:
        if key in values:
            raise DataError(f"{where}: has both prompt and messages; keep one of them")
        key = "messages"
    if key not in values:
        raise DataError(_no_key(row, key, "prompt_key", PROMPT_SHAPES if key == PROMPT_KEY else f"the key {key}"))
    if ground_truth_key != GROUND_TRUTH_KEY and ground_truth_key not in values:
        raise DataError(_no_key(row, ground_truth_key, "ground_truth_key", f"the key {ground_truth_key}"))
    value = values[key]
    content: Content
    if isinstance(value, str) and key != "messages":
        content = _not_empty(_text_content(fields.text(value, where, key), where), where)
        if isinstance(content, str) and prompt_template is not None:
            content = [{"role": "user", "content": prompt_template.replace(PROMPT_PLACE, content)}]
    else:
        content = _not_empty(fields.turns(value, where, key), where)
    return Prompt(
        where=where,
        source=row.source,
        content=_with_system(content, row),
        prompt_id=fields.identifier(row, "prompt_id", "id"),
        ground_truth=fields.ground_truth(row, ground_truth_key),
        split=fields.split(row),
    )


def pair_of(row: Row) -> Pair | Refused:
    """Read a row as a preference pair, or as a ranked list of responses.

    Args:
        row: With `chosen` and `rejected`, both text or both turns, and `prompt` unless they begin with it; or with
            `prompt`, `responses` and `ranks`. Optional `system`, `pair_id` or `id`, `margin` (a number), `agreement`
            (0.5 to 1), `split`. Other keys are not looked at.

    Returns:
        The pair, or the rule that leaves it out: identical_pair, empty_response, no_shared_prompt, differing_histories,
        roles_not_alternating.

    Raises:
        DataError: If a key is missing, has another type, or an explicit prompt is empty; with the row's position.
    """
    values, where = row.values, row.where
    if "responses" in values:
        return _ranked_list(row)
    if "chosen" not in values or "rejected" not in values:
        raise DataError(f"{where}: expected {PAIR_SHAPES}; found the keys {_keys(row)}")
    kinds = {key: type(values[key]) for key in ("chosen", "rejected")}
    if kinds["chosen"] is not kinds["rejected"] or kinds["chosen"] not in (str, list):
        raise DataError(
            f"{where}: expected chosen and rejected to be both text or both [turns]; found"
            f" {kinds['chosen'].__name__} and {kinds['rejected'].__name__}"
        )
    parts = _text_pair(row) if kinds["chosen"] is str else _turn_pair(row)
    if isinstance(parts, str):
        return Refused(where, parts)
    content, chosen, rejected = parts
    if not chosen.strip() or not rejected.strip():
        return Refused(where, "empty_response")
    if chosen == rejected:
        return Refused(where, "identical_pair")
    return _checked(row, content, [chosen, rejected], [0, 1])


def _ranked_list(row: Row) -> Pair | Refused:
    """Read a row with `responses` and `ranks`. Ranks may have gaps; only their order counts."""
    values, where = row.values, row.where
    if "prompt" not in values or "ranks" not in values or "chosen" in values or "rejected" in values:
        raise DataError(f"{where}: expected {PAIR_SHAPES}; found the keys {_keys(row)}")
    for key in ("responses", "ranks"):
        if not isinstance(values[key], list) or len(values[key]) < 2:
            raise DataError(f"{where}: {key}: expected a list of two or more")
    responses = [fields.text(text, where, f"responses[{place}]") for place, text in enumerate(values["responses"])]
    ranks = values["ranks"]
    if len(ranks) != len(responses):
        raise DataError(f"{where}: has {len(responses)} responses and {len(ranks)} ranks; expected one for each")
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise DataError(f"{where}: ranks is {ranks}: expected integers, the lowest one for the best response")
    for key in ("margin", "agreement"):
        if key in values and len(responses) > 2:
            raise DataError(f"{where}: {key} is about two responses, but there are {len(responses)}; leave it out")
    if not all(response.strip() for response in responses):
        return Refused(where, "empty_response")
    if len(set(responses)) == 1:
        return Refused(where, "identical_pair")
    content: Content
    if isinstance(values["prompt"], str):
        content = _text_content(fields.text(values["prompt"], where, "prompt"), where)
        # A transcript becomes turns, which have no white space around them.
        responses = responses if isinstance(content, str) else [response.strip() for response in responses]
    else:
        content = fields.turns(values["prompt"], where, "prompt")
    order = sorted(set(ranks))
    return _checked(row, content, responses, [order.index(rank) for rank in ranks])


def _checked(row: Row, content: Content, responses: list[str], ranks: list[int]) -> Pair:
    return Pair(
        where=row.where,
        source=row.source,
        content=_not_empty(_with_system(content, row), row.where),
        responses=responses,
        ranks=ranks,
        pair_id=fields.identifier(row, "pair_id", "id"),
        margin=fields.margin(row),
        agreement=fields.agreement(row),
        split=fields.split(row),
    )


def split_implicit(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Cut two texts with a common beginning into prompt, chosen and rejected response.

    Transcripts are cut behind the last "\\n\\nAssistant:" of their common beginning; other texts where it ends, moved
    back to before the white space in front of a word that it cuts. So first words that both responses share stay in
    them, white space goes with the response, and prompt + response is the original text.

    Returns:
        (prompt, chosen, rejected); the prompt is "" where the two share none.
    """
    cut = _common_length(chosen, rejected)
    if chosen.startswith(_HUMAN) and rejected.startswith(_HUMAN):
        marker = chosen.rfind(_ASSISTANT, 0, cut)
        cut = marker + len(_ASSISTANT) if marker >= 0 else 0
    elif not all(cut == len(text) or text[cut].isspace() for text in (chosen, rejected)):
        while cut and not chosen[cut - 1].isspace():
            cut -= 1
        while cut and chosen[cut - 1].isspace():
            cut -= 1
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _text_pair(row: Row) -> tuple[Content, str, str] | str:
    values, where = row.values, row.where
    chosen, rejected = (fields.text(values[key], where, key) for key in ("chosen", "rejected"))
    if "prompt" in values:
        prompt = values["prompt"]
        if isinstance(prompt, list):
            return fields.turns(prompt, where, "prompt"), chosen, rejected
        text = fields.text(prompt, where, "prompt")
        if not _is_transcript(text):
            return text, chosen, rejected
        return _transcript_pair(text, chosen, rejected)
    if other := [key for key in _OTHER_PROMPTS if key in values]:
        raise DataError(
            f"{where}: expected the prompt under the key prompt, or at the beginning of chosen and rejected; found also"
            f" {', '.join(other)}: rename that to prompt, or leave it out"
        )
    if not chosen.strip() or not rejected.strip():
        return "empty_response"
    if chosen == rejected:
        return "identical_pair"
    prompt, chosen, rejected = split_implicit(chosen, rejected)
    if not prompt.strip():
        return "no_shared_prompt"
    return _transcript_pair(prompt, chosen, rejected) if _is_transcript(prompt) else (prompt, chosen, rejected)


def _transcript_pair(prompt: str, chosen: str, rejected: str) -> tuple[Content, str, str] | str:
    if _MARKER.search(chosen) or _MARKER.search(rejected):
        return "differing_histories"
    turns = _transcript(prompt)
    if turns is None:
        return "roles_not_alternating"
    return turns, chosen.strip(), rejected.strip()


def _turn_pair(row: Row) -> tuple[Content, str, str] | str:
    values, where = row.values, row.where
    chosen, rejected = (fields.turns(values[key], where, key) for key in ("chosen", "rejected"))
    prompt = values.get("prompt")
    if isinstance(prompt, list):
        before = fields.turns(prompt, where, "prompt")
        whole = [turns[: len(before)] == before for turns in (chosen, rejected)]
        if any(whole) and not all(whole):
            raise DataError(f"{where}: one of chosen and rejected begins with the prompt, the other does not")
        if not all(whole):
            chosen, rejected = before + chosen, before + rejected
    elif prompt is not None and len(chosen) == len(rejected) == 1:
        before = [{"role": "user", "content": fields.text(prompt, where, "prompt")}]
        chosen, rejected = before + chosen, before + rejected
    if chosen == rejected:
        return "identical_pair"
    shared = chosen[: _common_length(chosen, rejected)]
    if not shared:
        return "no_shared_prompt"
    if isinstance(prompt, str) and {"role": "user", "content": prompt} not in shared:
        raise DataError(f"{where}: prompt is no user turn that chosen and rejected share; leave one of them out")
    endings = [turns[len(shared) :] for turns in (chosen, rejected)]
    if not all(endings):
        return "empty_response"
    if any(len(turns) != 1 or turns[0]["role"] != "assistant" for turns in endings):
        return "differing_histories"
    return shared, endings[0][0]["content"], endings[1][0]["content"]


def _text_content(text: str, where: str) -> Content:
    if not _is_transcript(text):
        return text
    turns = _transcript(text)
    if turns is None:
        raise DataError(f"{where}: Human and Assistant do not alternate in this transcript; give the prompt as [turns]")
    return turns


def _is_transcript(text: str) -> bool:
    return text.startswith(_HUMAN) and text.rstrip().endswith(_ASSISTANT)


def _transcript(text: str) -> list[Message] | None:
    """Turns of a transcript that ends in an open "\\n\\nAssistant:"; None unless the roles alternate."""
    parts = _MARKER.split(text)[1:-1]  # role, content, role, content, ..., role of the open turn
    roles, contents = parts[::2], parts[1::2]
    if any(role != ("Human", "Assistant")[index % 2] for index, role in enumerate(roles)):
        return None
    names = {"Human": "user", "Assistant": "assistant"}
    return [{"role": names[role], "content": content.strip()} for role, content in zip(roles, contents, strict=False)]


def _with_system(content: Content, row: Row) -> Content:
    if "system" not in row.values:
        return content
    system = fields.text(row.values["system"], row.where, "system")
    turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if turns[0]["role"] == "system":
        raise DataError(f"{row.where}: has a system key and a system turn; keep one of them")
    return [{"role": "system", "content": system}, *turns]


def _not_empty(content: Content, where: str) -> Content:
    text = content if isinstance(content, str) else content[-1]["content"]
    if not text.strip():
        raise DataError(f"{where}: the prompt is empty; remove the row or fill it in")
    return content


def _common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items two texts, or lists of turns, have in common at their beginning."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _no_key(row: Row, key: str, parameter: str, expected: str) -> str:
    """Says which key was expected and which there are, and names the nearest one and the parameter to change."""
    near = difflib.get_close_matches(key, map(str, row.values), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{row.where}: expected {expected}; found the keys {_keys(row)}{hint}: set ingest.{parameter} to one of them"


def _keys(row: Row) -> str:
    return ", ".join(sorted(map(str, row.values))) or "none"
