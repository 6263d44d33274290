"""Pure maths: ragged arrays in numpy and numba, losses in torch. No I/O and no configuration objects."""
