"""Pushing a patched model to the Hub: its files and a model card, as one commit; and a page about it."""

from .page import write_page
from .push import Push, push_patched

__all__ = ["Push", "push_patched", "write_page"]
