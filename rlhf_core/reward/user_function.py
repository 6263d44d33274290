"""Reward functions that a person wrote, in the project's directory user_rewards/."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.reward.rows import Row, ScoreRows

USER_REWARDS = Path("user_rewards")


class _Failed(ValueError):
    """A person's function raised something."""


def load_function(function: str) -> ScoreRows:
    """Return a person's function.

    Args:
        function: "module:name", the module a file (or package) below user_rewards/.

    Raises:
        ConfigError: If the module cannot be imported, or has no such function.
    """
    module_name, name = function.split(":")
    try:
        module = importlib.import_module(f"{USER_REWARDS}.{module_name}")
    except (Exception, SystemExit) as error:  # running a person's file may raise anything
        raise ConfigError(
            f"rewards: function {function}: importing {module_name} from {USER_REWARDS}/ failed: {_described(error)}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        near = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(
            f"rewards: function {function}: {module.__file__} has no function {name}; it has {near or 'none'}"
        )
    return found


def call_function(function: Callable[[list[Row]], Any], rows: list[Row], where: str) -> Any:
    """Return what a person's function returns for these rows, unchecked.

    Args:
        function: From load_function.
        rows: All rows of a shard.
        where: Names source and shard.

    Raises:
        RewardError: If it raises. It is then called with each row alone, to name the first that makes it raise.
    """
    try:
        return _called(function, rows)
    except _Failed as failure:
        whole = failure
    for row in rows:
        try:
            _called(function, [row])
        except _Failed as failure:
            raise RewardError(f"{where}: raised at sample {row['sample_id']}: {failure}") from failure
    raise RewardError(f"{where}: raised for all {len(rows)} rows together, for none alone: {whole}") from whole


def _called(function: Callable[[list[Row]], Any], rows: list[Row]) -> Any:
    try:
        return function([dict(row) for row in rows])
    except (Exception, SystemExit) as error:  # a person's function may raise anything; it is named and raised again
        raise _Failed(_described(error)) from error


def _described(error: BaseException) -> str:
    """Kind, text and place of an error in a person's file."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    at = f" ({Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno})" if place is not None else ""
    return f"{type(error).__name__}: {error}{at}"
