"""A pickle that runs code when it is read."""

import pickle
from pathlib import Path


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return (Path.touch, (self.marker,))


def bomb(marker: Path) -> bytes:
    """The bytes of an object that leaves a file behind when it is unpickled."""
    return pickle.dumps(_Bomb(marker))
