"""Seeds: every random choice derives from one seed and the names of what it is for."""

import hashlib


def derive_seed(seed: int, *scope: str | int) -> int:
    """Return a 63-bit seed that is a pure function of the run's seed and a scope.

    Args:
        seed: The `seed` of params.yaml.
        scope: What the seed is for, such as ("rollout", iteration, shard). Order matters.

    Returns:
        An integer in [0, 2**63), stable across machines and Python versions.
    """
    text = "\x1f".join([str(seed), *(str(part) for part in scope)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
