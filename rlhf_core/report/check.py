"""One finding of `rlhf doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    status: Literal["ok", "warning", "error"]
    text: str
