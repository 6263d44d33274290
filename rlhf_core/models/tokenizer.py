"""The tokenizer of a model directory, its EOS ids and its pad id. Only local files are read, no code is run."""

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_core.artifacts.lineage import check_directory
from rlhf_core.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local model directory, with a pad token.

    Args:
        directory: A Hugging Face model directory.

    Raises:
        ModelError: If the directory is missing, has no tokenizer that can be read, or it has neither pad nor EOS token.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory; expected a model with its tokenizer files")
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{directory}: no tokenizer files (looked for {', '.join(_TOKENIZER_FILES)}); copy the tokenizer of the"
            " model into the directory, for instance with tokenizer.save_pretrained"
        )
    check_directory(directory)
    _check_json(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{directory}: the tokenizer cannot be read: {error!r:.300}") from None
    pad_id(tokenizer)
    return tokenizer


def _check_json(directory: Path) -> None:
    """Refuse files that are no JSON by name; the tokenizers library raises a plain Exception for them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            if (path := directory / name).is_file():
                json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # undecodable text is one
            raise ModelError(
                f"{path}: not JSON, so the tokenizer cannot be read ({error}); copy it from the model again"
            ) from None


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the pad id, choosing the EOS where the tokenizer has none and recording the choice in the tokenizer.

    Sharing an id with the EOS is safe here: masks come from lengths, never from comparing ids. The vocabulary, and so
    the model's embedding, stays as it is.

    Raises:
        ModelError: If the tokenizer has neither a pad nor an EOS token.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                "the tokenizer has neither a pad nor an EOS token; set tokenizer.eos_token and save it again"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return int(tokenizer.pad_token_id)


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return a token's text; as the vocabulary writes it where it is part of a character or decodes to nothing.

    An id that the tokenizer lacks (a model's vocabulary may be padded) is given as a number.
    """
    text = str(tokenizer.decode([token_id], skip_special_tokens=False))
    if text and "\ufffd" not in text:
        return text
    written = tokenizer.convert_ids_to_tokens(token_id)
    return f"[id {token_id}]" if written is None else str(written)


def eos_ids(directory: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all ids that end a response, ascending: those of the model's generation settings and the tokenizer's.

    Args:
        directory: The model directory. The settings are generation_config.json, or config.json where there is none, as
            in transformers; their eos_token_id may be an integer, a list or null.
        tokenizer: The tokenizer of that directory.

    Raises:
        ModelError: If a setting is not of that form, or no id is found: every response would run to its limit.
    """
    names = [name for name in ("generation_config.json", "config.json") if (directory / name).is_file()]
    declared = _declared_eos(directory / names[0]) if names else []
    ids = sorted({*declared, *([] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)])})
    if not ids:
        raise ModelError(
            f"{directory}: no EOS id in generation_config.json or the tokenizer; every response would be cut off."
            " Set eos_token_id in generation_config.json"
        )
    return ids


def _declared_eos(path: Path) -> list[int]:
    try:
        declared = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path}: not a JSON object: {error}") from None
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ModelError(f"{path}: eos_token_id is {declared!r}; expected a token id, a list of ids, or null")
    return ids
