"""Text from models and data, made safe to look at."""

import unicodedata

# Joiners inside words and emoji; invisible, but they neither move the cursor nor reorder text.
_HARMLESS = {"\u200c", "\u200d"}


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with control characters written out, so that it cannot steer a terminal or reorder a line.

    Escape becomes \x1b, a line break \n, a right-to-left override \u202e.

    Args:
        text: Any text, such as a response.
        keep: Control characters that stay as they are, such as "\n\t".
    """
    if text.isprintable():
        return text
    return "".join(_written_out(char) if _steers(char) and char not in keep else char for char in text)


def _steers(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in _HARMLESS


def _written_out(char: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return named.get(char) or char.encode("unicode_escape", "surrogatepass").decode("ascii")
