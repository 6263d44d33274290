"""Checks of the single keys of a row: text, turns, ids, splits, numbers. Errors name the row's position and the key."""

import json
import re
from decimal import Decimal
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.ingest.formats import SPLITS, Row

Message = dict[str, str]  # {"role": "user", "content": "..."}
Content = str | list[Message]  # plain text, or turns

ROLES = ("system", "user", "assistant")

_ID = re.compile(r"[A-Za-z0-9_.:/-]+")
_MAX_FLOAT32 = 3.4028234663852886e38


def text(value: Any, where: str, key: str) -> str:
    """Return a value that must be text which can be written as UTF-8.

    Raises:
        DataError: If it is not.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {key}: expected text, found {_describe(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise DataError(
            f"{where}: {key}: character {error.start} is {half}, half of a surrogate pair: no text; repair it"
        ) from None
    return value


def turns(value: Any, where: str, key: str) -> list[Message]:
    """Return the roles and contents of a value that must be a list of turns.

    Raises:
        DataError: If it is empty, no list, or a turn has another role, no text, or keys that would be lost.
    """
    if not isinstance(value, list) or not value:
        found = "an empty list" if isinstance(value, list) else _describe(value)
        raise DataError(f"{where}: {key}: expected text or a list of turns, found {found}")
    checked = []
    for index, turn in enumerate(value):
        place = f"{key}[{index}]"
        if not isinstance(turn, dict) or turn.get("role") is None or turn.get("content") is None:
            empty = [name for name, item in turn.items() if item is None] if isinstance(turn, dict) else []
            null = f", of which {', '.join(empty)} is null" if empty else ""
            raise DataError(
                f'{where}: {place}: expected {{"role": ..., "content": text}}, found {_describe(turn)}{null}'
            )
        # Data sets of one schema for all fill what a turn does not have with an empty list or text.
        extra = [name for name, item in turn.items() if name not in ("role", "content") and item not in (None, [], "")]
        if extra:
            raise DataError(f"{where}: {place}: only role and content are read, found also {', '.join(extra)}")
        if turn["role"] not in ROLES:
            raise DataError(f"{where}: {place}: expected a role of {', '.join(ROLES)}, found {turn['role']!r}")
        checked.append({"role": turn["role"], "content": text(turn["content"], where, f"{place}.content")})
    return checked


def identifier(row: Row, *keys: str) -> str | None:
    """Return the first of these keys that the row has, an integer as text; None if it has none.

    Raises:
        DataError: If it holds more than letters, digits and _ . : / -
    """
    for key in keys:
        value = row.values.get(key)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not _ID.fullmatch(text(value, row.where, key)):
            raise DataError(f"{row.where}: {key} is {value!r}: expected only letters, digits and _ . : / -")
        return str(value)
    return None


def split(row: Row) -> str | None:
    """Return the row's own side, train or eval; None if it has none.

    Raises:
        DataError: If it is no name of a split.
    """
    value = row.values.get("split")
    if value is None:
        return None
    if text(value, row.where, "split") not in SPLITS:
        raise DataError(f"{row.where}: split is {value!r}: expected one of {', '.join(SPLITS)}")
    return SPLITS[value]


def margin(row: Row) -> float | None:
    """Return the row's margin; None if it has none.

    Raises:
        DataError: If it is no finite number, or too large for float32.
    """
    value = row.values.get("margin")
    if value is None:
        return None
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{row.where}: margin: expected a number, found {_describe(value)}")
    # Refuses NaN as well: no comparison with it is true.
    if not abs(value) <= _MAX_FLOAT32:
        raise DataError(f"{row.where}: margin is {value}: expected a finite number")
    return float(value)


def agreement(row: Row) -> float | None:
    """Return the share of annotators who prefer the chosen response; None if the row does not tell.

    Raises:
        DataError: If it is no number in [0.5, 1]: below, the majority would prefer the other response.
    """
    value = row.values.get("agreement")
    if value is None:
        return None
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{row.where}: agreement: expected a number, found {_describe(value)}")
    if not 0.5 <= value <= 1:
        raise DataError(
            f"{row.where}: agreement is {value}: expected 0.5 to 1, the share of annotators who prefer the chosen one"
        )
    return float(value)


def ground_truth(row: Row, key: str) -> str | None:
    """Return the row's ground truth, any JSON value under this key, as JSON text; None if it has none.

    Raises:
        DataError: If it has no form in JSON.
    """
    value = row.values.get(key)
    if value is None:
        return None
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, default=_encodable)
    except (TypeError, ValueError) as error:
        raise DataError(f"{row.where}: {key}: expected a JSON value: {error}") from None
    return text(written, row.where, key)


def _plain(value: Any) -> Any:
    """A Parquet decimal as a number: an integer where it has no places, which float would round; else as it is."""
    if not isinstance(value, Decimal):
        return value
    return int(value) if value.as_tuple().exponent == 0 else float(value)


def _encodable(value: Any) -> Any:
    """What json.dumps writes for a value that JSON does not have."""
    if isinstance(value, Decimal):
        return _plain(value)
    raise DataError(f"a {type(value).__name__} has no form in JSON; write it as text or as a number")


def _describe(value: Any) -> str:
    return f"an object with the keys {', '.join(map(str, value))}" if isinstance(value, dict) else type(value).__name__
