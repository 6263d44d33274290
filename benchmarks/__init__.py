"""Measurements on public data that are no part of the pipeline and of its tests."""
