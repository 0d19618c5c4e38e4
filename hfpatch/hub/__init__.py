"""Pushing a patched checkpoint to the Hub: which files travel, the model card, one commit."""

from .push import Push, PushedFile, push_patched

__all__ = ["Push", "PushedFile", "push_patched"]
