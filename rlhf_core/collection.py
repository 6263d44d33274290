"""Python's garbage collector, kept from looking through what stays until the process ends.

torch, transformers and vllm make more than a million objects while they are imported. Passes over all of them took half
of the time of the imports, and most of the time that a process needs to end.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def start_collecting() -> None:
    """Collect garbage from now on, but never again among the objects that are there already."""
    gc.freeze()
    gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Import large modules without collecting meanwhile; to be used where they are not imported at the top."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
