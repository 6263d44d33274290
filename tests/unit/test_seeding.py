"""Seeds are pure functions of the run's seed and their scope.

Mutations that must fail here: separator removed; scope sorted; seed left out; the shift by one bit removed.
"""

import hashlib
import subprocess
import sys

from rlhf_core.seeding import derive_seed


def test_value_is_the_first_63_bits_of_a_stated_hash() -> None:
    # sha256 of the parts joined by the ASCII unit separator; computed here with another route to the same bits.
    digest = hashlib.sha256(b"0\x1frollout\x1f1\x1f2").hexdigest()
    assert derive_seed(0, "rollout", "1", 2) == int(digest[:16], 16) // 2


def test_known_value_never_changes() -> None:
    # printf '7' | sha256sum -> 7902699be42c8a8e46fbbb4501726517e86b22c56a189f7625a6da49081b2451
    assert derive_seed(7) == 0x7902699BE42C8A8E >> 1


def test_every_part_matters_and_so_does_their_order() -> None:
    scopes: list[tuple[str | int, ...]] = [
        ("a", 1),
        (1, "a"),
        ("a", 2),
        ("b", 1),
        ("a",),
        (),
        ("a", 1, ""),
        ("a1",),
        ("", "a", 1),
    ]
    seeds = {derive_seed(seed, *scope) for seed in (0, 1) for scope in scopes}
    assert len(seeds) == 2 * len(scopes)


def test_seed_is_not_confused_with_the_scope() -> None:
    assert derive_seed(1, "2") != derive_seed(12)


def test_fits_a_signed_64_bit_integer() -> None:
    seeds = [derive_seed(0, index) for index in range(2000)]
    assert min(seeds) >= 0
    assert max(seeds) < 2**63
    assert max(seeds) > 2**62  # the upper half is reached


def test_same_in_another_process() -> None:
    command = "from rlhf_core.seeding import derive_seed; print(derive_seed(3, 'ppo_update', '2'))"
    found = {
        subprocess.run(
            [sys.executable, "-c", command],
            env={"PYTHONHASHSEED": hashseed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hashseed in ("1", "2")
    }
    assert found == {str(derive_seed(3, "ppo_update", "2"))}
