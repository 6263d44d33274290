"""What pydantic finds wrong with params.yaml or iterations.yaml, in words for the person who wrote it."""

import difflib
from typing import Any

from pydantic import BaseModel

from rlhf_core.reward_config import KINDS


def explain(model: type[BaseModel], item: Any, where: str) -> str:
    """Return one line for one pydantic error: key, value, what is allowed, and the nearest valid key.

    Args:
        model: What was read.
        item: Of ValidationError.errors().
        where: Names the file, and the iteration if it is one's.
    """
    location = [str(part) for part in item["loc"] if not str(part).startswith(("function-", "is-instance"))]
    if group := _rewards_group(location):
        model, location = _in_source(model, location, group)
    key = ".".join(location)
    if group and item["type"] in _SOURCE_ERRORS:
        return f"{where}: {_SOURCE_ERRORS[item['type']](key, item)}"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _fields_at(model, location[:-1]), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"{where}: unknown key {key}{hint}"
    if item["type"] == "missing":
        return f"{where}: missing key {key}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {key + ': ' if key else ''}{message}"
    return f"{where}: {key} is {item['input']!r}: {message[0].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], location: list[str]) -> list[str]:
    if _rewards_group(location):
        return list(model.model_fields)
    for part in location:
        field = model.model_fields.get(part)
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return []
        model = field.annotation
    return list(model.model_fields)


def _rewards_group(location: list[str]) -> int:
    """How many parts of a location name the map of reward sources that it is in; 0 outside of both."""
    return next((len(group) for group in _GROUPS if location[: len(group)] == group), 0)


def _in_source(model: type[BaseModel], location: list[str], group: int) -> tuple[type[BaseModel], list[str]]:
    """The class of the source that a location below `group` parts is in, and the location without the kind in it."""
    kind = group + 1
    if len(location) > kind and location[kind] in KINDS:
        return KINDS[location[kind]], location[:kind] + location[kind + 1 :]
    return model, [part for part in location if part != "[key]"]


def _wrong_kind(key: str, item: Any) -> str:
    kind = item["ctx"]["tag"]
    near = difflib.get_close_matches(kind, KINDS, n=1)
    return f"{key}.kind is {kind!r}: expected {', '.join(KINDS)}" + (f" (did you mean {near[0]}?)" if near else "")


def _no_kind(key: str, item: Any) -> str:
    return f"missing key {key}.kind: expected {', '.join(KINDS)}"


def _wrong_name_or_text(key: str, item: Any) -> str:
    if item["loc"][-1] == "[key]":
        return f"{key}: expected a name of 1 to 64 letters, digits and underscores; it names the column score_<name>"
    if item["loc"][-1] == "auth_env":  # whoever misread it wrote the token itself there
        return f"{key}: expected the name of an environment variable; what is there instead is not shown"
    return f"{key} is {item['input']!r}: expected module:function, of a module in user_rewards"


# Where params.yaml has maps of reward sources.
_GROUPS = (["rewards"], ["evaluate", "rewards"])
# What pydantic says about a union or a pattern is about its own workings.
_SOURCE_ERRORS = {
    "union_tag_invalid": _wrong_kind,
    "union_tag_not_found": _no_kind,
    "string_pattern_mismatch": _wrong_name_or_text,
}
