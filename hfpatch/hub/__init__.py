"""Pushing a patched model to the Hub: its files and a model card, as one commit."""

from .push import Push, push_patched

__all__ = ["Push", "push_patched"]
