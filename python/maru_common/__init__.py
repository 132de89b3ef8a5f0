"""Names that callers of old import from here."""

from maru.config import MaruConfig

__all__ = ["MaruConfig"]
