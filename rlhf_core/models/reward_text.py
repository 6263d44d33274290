"""How a reward model with a tokenizer of its own reads a prompt and a response: text passes to it, ids never do.

Left out: a reward model with the policy's tokenizer, which takes the policy's ids as they are.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.ingest.chat import prompt_ids, response_ids
from rlhf_core.ingest.fields import Content
from rlhf_core.models.tokenizer import pad_id


@dataclass(frozen=True)
class TextReader:
    """A reward model's tokenizer, and how much the model can read."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int | None  # of prompt and response together, special tokens included; None = no limit


def text_reader(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TextReader:
    """Return a reader of texts for a model, and record its pad id in both where one of them has none.

    The limit is the number of the model's positions, and the tokenizer's own where it is lower. RoBERTa's positions
    begin behind the pad id, so it has fewer than its table has rows.

    Args:
        model: A sequence classifier.
        tokenizer: Its own.

    Raises:
        ModelError: If the tokenizer has neither a pad nor an EOS token.
    """
    model.config.pad_token_id = pad_id(tokenizer)
    limits = [int(tokenizer.model_max_length)]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions:
        offset: Any = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
        limits.append(positions if offset is None else positions - offset - 1)
    limit = min(limits)
    return TextReader(tokenizer, limit if limit < _UNLIMITED else None)


_UNLIMITED = 10**9  # tokenizers without a limit say 10^30


def text_ids(reader: TextReader, content: Content, response: str) -> tuple[list[int], list[int]]:
    """Return prompt ids and response ids of one row, in the form that the tokenizer was made for.

    With a chat template: the rendered turns, then the response, closed by the EOS, as ingest does it for the policy.
    With CLS and SEP tokens (encoders), and no template: the tokenizer's own form for a pair of texts. Else: plain text
    and response, closed by the EOS. Special strings in the texts are read as plain text.

    A row that is too long loses the beginning of its prompt, and then the end of its response. A BOS and the special
    tokens of a pair stay; so does one token of the prompt.

    Args:
        reader: From text_reader.
        content: The prompt: plain text, or turns that end in a user turn.
        response: The response's text.

    Returns:
        ([P] with P at least 1, [T]); the special tokens of a pair are in the part that they follow or open.

    Raises:
        DataError: If the chat template refuses the turns.
    """
    tokenizer = reader.tokenizer
    if tokenizer.chat_template is None:
        content = _as_text(content)
        if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
            return _pair_ids(reader, content, response)
    _, prompt = prompt_ids(tokenizer, content, special_tokens_in_text="escape")
    if tokenizer.eos_token_id is None:
        closed = response_ids(tokenizer, response, eos_id=0)[:-1]
    else:
        closed = response_ids(tokenizer, response, eos_id=int(tokenizer.eos_token_id))
    if reader.max_tokens is None or len(prompt) + len(closed) <= reader.max_tokens:
        return prompt, closed
    begin = prompt[:1] if prompt[0] == tokenizer.bos_token_id else []
    room = max(reader.max_tokens - len(closed) - len(begin), 0 if begin else 1)
    prompt = begin + prompt[len(begin) :][len(prompt) - len(begin) - room :]
    return prompt, closed[: reader.max_tokens - len(prompt)]


def _as_text(content: Content) -> str:
    """A prompt for a tokenizer without a chat template: a single user turn as it is, more turns with their roles."""
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return content[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in content)


def _pair_ids(reader: TextReader, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """Ids of a pair of texts as the tokenizer joins them, cut where the response begins."""
    encoded: Any = reader.tokenizer(prompt, response, split_special_tokens=True)
    ids: list[int] = encoded["input_ids"]
    owners: list[int | None] = encoded.sequence_ids(0)  # 0 = prompt, 1 = response, None = a special token
    begin = owners.index(1) if 1 in owners else len(ids)
    excess = len(ids) - (reader.max_tokens or len(ids))
    if excess > 0:
        first = [place for place, owner in enumerate(owners) if owner == 0][:excess]
        second = [place for place, owner in enumerate(owners) if owner == 1]
        removed = {*first, *second[len(second) - min(excess - len(first), len(second)) :]}
    else:
        removed = set()
    return [ids[place] for place in range(begin) if place not in removed], [
        ids[place] for place in range(begin, len(ids)) if place not in removed
    ]
