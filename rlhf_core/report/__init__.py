"""Metrics, health advice, completions, plots and the HTML page."""
