"""Scripts for people who work on the project; nothing in the pipeline imports them."""
