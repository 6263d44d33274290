"""The records themselves, pinned: what each project's code says.

Their effects are pinned by golden rows in tests/unit/test_estimates.py.
"""

from typing import Any, get_args

import pytest

from rlhf_core.algorithms.conventions import CONVENTIONS, Conventions
from rlhf_core.config import Params


def test_there_is_a_record_for_each_name_that_params_yaml_allows() -> None:
    assert tuple(CONVENTIONS) == get_args(Params.model_fields["conventions"].annotation)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ours", (False, "population", "added", 20.0, None, (), 0.5, 1e-4)),
        ("trl", (True, "bessel", "added", None, None, (), 0.5, 1e-4)),
        ("verl", (False, "bessel", "added", 20.0, 10.0, ("k3",), 0.5, 1e-6)),
        ("openrlhf", (False, "population", "floor", None, 10.0, ("k1", "k2", "k3"), 0.5, 1e-9)),
    ],
)
def test_each_record(name: str, expected: tuple[Any, ...]) -> None:
    assert CONVENTIONS[name] == Conventions(*expected)


def test_the_bound_applies_to_its_estimators_only() -> None:
    names = ("k1", "k2", "k3", "absolute", "full")
    assert [CONVENTIONS["verl"].kl_bound(name) for name in names] == [None, None, 10, None, None]  # type: ignore[arg-type]
    assert [CONVENTIONS["openrlhf"].kl_bound(name) for name in names] == [10, 10, 10, None, None]  # type: ignore[arg-type]
