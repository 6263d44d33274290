"""Presets: named sets of parameters in presets/NAME.yaml, written into params.yaml and iterations.yaml.

A preset holds `params`, a part of params.yaml, and `iterations`, all of iterations.yaml's. What it does not name stays
as it is, comments included. Every preset names the same keys (tests/unit/test_presets.py), so that one may follow
another.
"""

import difflib
import io
import tempfile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.representer import RoundTripRepresenter

from rlhf_core.config import load_run
from rlhf_core.errors import ConfigError
from rlhf_core.report.metrics import write_text

FILES = ("params.yaml", "iterations.yaml")
# Maps whose keys are names of the user's own: a preset's replaces one whole.
NAMED = (("rewards",), ("evaluate", "rewards"))

Change = tuple[str, str, str]  # key, old value, new value


def presets(root: Path) -> dict[str, str]:
    """Return the name of each preset and the first line of the comment at its top, in order of the names."""
    found = {}
    for path in sorted((root / "presets").glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found[path.stem] = first.lstrip("# ").rstrip() if first.startswith("#") else ""
    return found


def apply_preset(root: Path, name: str) -> list[Change]:
    """Write a preset into params.yaml and iterations.yaml and return what it changed; empty = nothing was written.

    Comments and order of both files stay. They are checked as a run checks them before anything is written, and each
    is replaced whole.

    Args:
        root: Project directory.
        name: Of the preset.

    Raises:
        ConfigError: If there is no such preset, it is malformed, or the parameters with it are not valid.
    """
    known = presets(root)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"no preset {name!r}{hint}; presets/ has {', '.join(known) or 'none'}")
    path = root / "presets" / f"{name}.yaml"
    where = path.relative_to(root)
    preset = _load(path)
    if not isinstance(preset, dict) or set(preset) != {"params", "iterations"}:
        raise ConfigError(f"{where}: expected two maps, params and iterations")
    old = {file: _load(root / file) for file in FILES}
    new = {file: _load(root / file) for file in FILES}
    _merge(new["params.yaml"], preset["params"], (), where)
    if old["iterations.yaml"]["iterations"] != preset["iterations"]:
        new["iterations.yaml"]["iterations"] = preset["iterations"]
    changes = _differences(old["params.yaml"], new["params.yaml"], ())
    changes += _differences(old["iterations.yaml"], new["iterations.yaml"], ())
    if changes:
        texts = {file: _dump(content) for file, content in new.items()}
        _check(texts, where)
        for file, text in texts.items():
            write_text(root / file, text)
    return changes


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096  # a flow map stays on its line
    yaml.Representer = _WithNull
    return yaml


class _WithNull(RoundTripRepresenter):
    """Writes null as null, as params.yaml does, and not as nothing."""

    def represent_none(self, data: Any) -> Any:
        """Return the node of a null."""
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_WithNull.add_representer(type(None), _WithNull.represent_none)


def _load(path: Path) -> Any:
    try:
        return _yaml().load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; run from the project's root") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def _dump(content: Any) -> str:
    text = io.StringIO()
    _yaml().dump(content, text)
    return text.getvalue()


def _merge(content: Any, values: Any, at: tuple[str, ...], where: Path) -> None:
    """Set the values of a preset in params.yaml, map by map."""
    for key, value in values.items():
        place = (*at, key)
        if key not in content:
            near = difflib.get_close_matches(key, map(str, content), n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"{where}: params.{'.'.join(place)}: params.yaml has no such key{hint}")
        if place in NAMED:
            _replace_all(content[key], value)
        elif isinstance(content[key], dict) and isinstance(value, dict):
            _merge(content[key], value, place, where)
        elif content[key] != value:
            content[key] = value


def _replace_all(old: CommentedMap, new: CommentedMap) -> None:
    """Put other items into a map and keep what follows it: the empty line, and comments on lines of their own."""
    if old == new:
        return
    last = old.ca.items.get(next(reversed(old), None))
    after = last[2].value.partition("\n")[2] if last and last[2] else ""
    for key in list(old):
        del old[key]
    for key, value in new.items():
        old[key] = value
    if after:
        token = last[2]
        token.value = "\n" + after
        old.ca.items[next(reversed(old))] = [None, None, token, None]


def _differences(old: Any, new: Any, at: tuple[str, ...]) -> list[Change]:
    """Changed values with their keys; a map of names is one value."""
    if at not in (*NAMED, ("iterations",)) and isinstance(old, dict) and isinstance(new, dict):
        return [one for key in new for one in _differences(old[key], new[key], (*at, key))]
    return [] if old == new else [(".".join(at), _shown(old, at), _shown(new, at))]


def _shown(value: Any, at: tuple[str, ...]) -> str:
    """A value on one line; of an iteration, what it overrides."""
    if at == ("iterations",):
        return ", ".join(name + _overrides(entry) for name, entry in value.items()) or "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item, ())}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _overrides(entry: dict[str, Any]) -> str:
    found = {section: keys for section, keys in entry.items() if section != "prev" and keys}
    return f" {_shown(found, ())}" if found else ""


def _check(texts: dict[str, str], where: Path) -> None:
    """Refuse what a run would refuse."""
    with tempfile.TemporaryDirectory() as directory:
        for file, text in texts.items():
            (Path(directory) / file).write_text(text, encoding="utf-8")
        try:
            load_run(directory)
        except ConfigError as error:
            raise ConfigError(f"{where} does not fit this project, so nothing was changed:\n{error}") from None
