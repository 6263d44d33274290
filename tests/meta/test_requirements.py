"""The locks agree with each other."""

import re

import pytest

from tests.meta.project import ROOT


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split("==") for line in lines if re.match(r"[A-Za-z0-9]", line)]
    return {package.lower().replace("_", "-"): version for package, version in split}


def test_trl_is_compared_on_the_versions_that_everything_else_runs_on() -> None:
    parity, known = pins("parity"), {**pins("cpu"), **pins("dev")}
    assert {name: version for name, version in parity.items() if known.get(name) != version} == {"trl": "1.12.0"}


@pytest.mark.parametrize("name", ["cpu", "gpu", "dev", "parity"])
def test_every_line_pins_one_version(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line and not line.startswith("#") and not re.fullmatch(r"\S+==\S+", line)]
