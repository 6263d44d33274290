"""Text and turns to ids: one BOS, and no string of the user's ever becomes a control token.

A chat template writes control tokens such as <|im_end|> as text, so a user who types that text could forge a turn.
Here only what the template itself wrote is read as a control token; the same characters inside a turn are tokenised as
plain text. Loads no model and imports no torch.
"""

import re
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rlhf_core.errors import DataError
from rlhf_core.ingest.fields import Content, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A template is a program of the model's, with a program's faults.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)
_TURN_MARK = "\ue000{}\ue001"  # private-use characters, which no template contains


def prompt_ids(
    tokenizer: "PreTrainedTokenizerBase", content: Content, *, special_tokens_in_text: str
) -> tuple[str, list[int]]:
    """Return a prompt as the model gets it: rendered text and ids.

    Turns are rendered with the chat template, the opening of the assistant's turn included, and tokenised without
    adding special tokens: the template writes the BOS where the model wants one. Plain text gets the BOS that the
    tokenizer itself adds, and no template.

    Args:
        tokenizer: Of the policy.
        content: Plain text, or turns that end in a user turn.
        special_tokens_in_text: "escape" tokenises special strings inside the content as plain text; with anything else
            they are refused. Content without such a string gets the tokenizer's ordinary ids.

    Returns:
        (rendered text, ids [P]).

    Raises:
        DataError: If there is no chat template for turns, the turns do not end in a user turn, the template refuses
            them or changes content that has to be escaped, special strings are not to be escaped, or no token is left.
    """
    found = special_string(tokenizer, content)
    if found is not None and special_tokens_in_text != "escape":
        raise DataError(
            f"the text contains the special token {found!r}; set ingest.special_tokens_in_text to escape or drop"
        )
    if isinstance(content, str):
        begin = tokenizer("a")["input_ids"][:1]
        begin = begin if begin == [tokenizer.bos_token_id] else []
        return content, _some(begin + _plain_ids(tokenizer, content))
    if content[-1]["role"] != "user":
        raise DataError(
            f"the conversation ends in a turn of the {content[-1]['role']}; a prompt ends in a user turn: cut it there"
        )
    rendered = _render(tokenizer, content)
    if found is None:
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    else:
        ids = _escaped_ids(tokenizer, content, rendered)
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        raise DataError(f"the chat template begins with {tokenizer.bos_token!r} twice; repair it: a prompt has one BOS")
    return rendered, _some(ids)


def _some(ids: list[int]) -> list[int]:
    if not ids:
        raise DataError("the prompt has no tokens: the chat template, or the tokenizer, leaves nothing of it")
    return ids


def response_ids(tokenizer: "PreTrainedTokenizerBase", text: str, *, eos_id: int) -> list[int]:
    """Return the ids [T] of a response text, closed by the EOS.

    Args:
        tokenizer: Of the policy.
        text: The response; special strings in it are tokenised as plain text.
        eos_id: Id that ends a response.
    """
    return [*_plain_ids(tokenizer, text), eos_id]


def special_string(tokenizer: "PreTrainedTokenizerBase", content: Content) -> str | None:
    """Return the first special token that the content spells out, or None."""
    pattern = _special_tokens(tokenizer)[0]
    for text in [content] if isinstance(content, str) else [turn["content"] for turn in content]:
        if match := pattern.search(text) or _normalised_match(tokenizer, text):
            return match.group()
    return None


def _normalised_match(tokenizer: "PreTrainedTokenizerBase", text: str) -> re.Match[str] | None:
    """The first special token that the text spells out when it is normalised, as <|IM_END|> in lower case.

    A tokenizer searches normalised text for those of its tokens that say so.
    """
    normaliser, pattern = _normalised_tokens(tokenizer)
    return None if normaliser is None else pattern.search(normaliser.normalize_str(text))


@lru_cache(maxsize=8)
def _normalised_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[Any, re.Pattern[str]]:
    """The tokenizer's normaliser, and a pattern for normalised special strings; None where that finds nothing new."""
    normaliser = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    special = set(_special_tokens(tokenizer)[1].values())
    found = [token for index, token in tokenizer.added_tokens_decoder.items() if index in special and token.normalized]
    strings = {normaliser.normalize_str(str(token)) for token in found} - {""} if normaliser is not None else set()
    longest_first = sorted(strings, key=lambda text: (-len(text), text))
    return (normaliser if strings else None), re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _render(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template, and this prompt has turns; add chat_template.jinja to the model, or"
            " give prompts as plain text"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except _TEMPLATE_ERRORS as error:
        roles = ", ".join(turn["role"] for turn in messages)
        raise DataError(
            f"the chat template does not take the turns {roles}: {str(error) or type(error).__name__}"
        ) from None


def _plain_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Ids of a text in which no string is special."""

    def read(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    ids = read(text)
    marks = _turn_marks(tokenizer)
    if not set(marks.values()) & set(ids):
        return ids
    # The tokenizer itself has no setting for these: cut each behind its first character, so that it is not one token.
    cuts = [found.start() + 1 for found in re.finditer("|".join(map(re.escape, marks)), text)]
    ids = [index for begin, end in pairwise([0, *cuts, len(text)]) for index in read(text[begin:end])]
    if set(marks.values()) & set(ids) or tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
        raise DataError(
            f"the text contains {', '.join(sorted(mark for mark in marks if mark in text))}, which the chat template"
            " writes around turns and which this tokenizer cannot read as plain text; leave these rows out"
        )
    return ids


@lru_cache(maxsize=8)
def _turn_marks(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Added tokens that the chat template writes around a turn though the tokenizer does not call them special."""
    plain = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if not token.special}
    if tokenizer.chat_template is None or not plain:
        return {}
    try:
        around = _render(tokenizer, [{"role": "user", "content": _TURN_MARK.format(0)}])
    except DataError:
        return {}
    return {text: index for text, index in plain.items() if text in around}


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[re.Pattern[str], dict[str, int]]:
    """A pattern for all special strings, longest first, and their ids."""
    ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    ids |= {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids |= _turn_marks(tokenizer)
    strings = sorted(ids, key=lambda text: (-len(text), text))
    # Without special tokens, a pattern that matches nothing.
    return re.compile("|".join(map(re.escape, strings)) or r"(?!)"), ids


def _escaped_ids(tokenizer: "PreTrainedTokenizerBase", messages: list[Message], rendered: str) -> list[int]:
    """Ids of a rendered conversation whose turns contain special strings, which are read as plain text.

    The text is cut at the template's control tokens only, as the tokenizer itself does, so that nothing else changes:
    without the special strings, the ids would be the ordinary ones. That is checked.
    """
    pieces = _locate(tokenizer, messages, rendered)
    pattern, special = _special_tokens(tokenizer)
    harmless = [(_harmless(tokenizer, text) if inside else text, inside) for text, inside in pieces]
    ordinary = tokenizer("".join(text for text, _ in harmless), add_special_tokens=False)["input_ids"]
    ids = _ids_of_pieces(tokenizer, pieces)
    # The id for unknown text is special too, but plain text may hold it.
    control = set(special.values()) - {tokenizer.unk_token_id}
    written = sum(len(pattern.findall(text)) for text, inside in pieces if not inside)
    if _ids_of_pieces(tokenizer, harmless) != ordinary or sum(index in control for index in ids) != written:
        raise DataError(
            "this tokenizer reads text next to its special tokens differently, so special strings in the text cannot be"
            " escaped exactly; set ingest.special_tokens_in_text to drop or error"
        )
    return ids


def _harmless(tokenizer: "PreTrainedTokenizerBase", text: str) -> str:
    """The text without its special strings; nothing of it where only its normalised form has one."""
    text = _special_tokens(tokenizer)[0].sub("x", text)
    return "x" if _normalised_match(tokenizer, text) else text


def _locate(tokenizer: "PreTrainedTokenizerBase", messages: list[Message], rendered: str) -> list[tuple[str, bool]]:
    """Pieces (text, whether it is a turn's content) of the rendered text, found by rendering marks for contents."""
    marks = [_TURN_MARK.format(index) for index in range(len(messages))]
    skeleton = _render(tokenizer, [{**turn, "content": mark} for turn, mark in zip(messages, marks, strict=True)])
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", skeleton)
    # Some templates trim every turn; no other change is followed.
    for change in (str, str.strip):
        texts = {mark: change(turn["content"]) for mark, turn in zip(marks, messages, strict=True)}
        pieces = [(texts.get(part, part), part in texts) for part in parts]
        if "".join(text for text, _ in pieces) == rendered:
            return pieces
    raise DataError(
        "the chat template changes the text of a turn that contains special tokens, so that they cannot be escaped; set"
        " ingest.special_tokens_in_text to drop or error"
    )


def _ids_of_pieces(tokenizer: "PreTrainedTokenizerBase", pieces: list[tuple[str, bool]]) -> list[int]:
    """Ids of text in which only strings outside of turns are special."""
    pattern, special = _special_tokens(tokenizer)
    ids: list[int] = []
    stretch = ""
    for text, inside in pieces:
        at = 0
        for match in () if inside else pattern.finditer(text):
            stretch += text[at : match.start()]
            ids += _plain_ids(tokenizer, stretch) if stretch else []
            ids.append(special[match.group()])
            stretch, at = "", match.end()
        stretch += text[at:]
    return ids + (_plain_ids(tokenizer, stretch) if stretch else [])
