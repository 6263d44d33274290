"""Reward sources and their weighted sum."""
