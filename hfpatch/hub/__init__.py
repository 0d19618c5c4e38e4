"""Pushing a patched checkpoint to the Hub: which files travel, the model card, one commit."""

from .outcome import Push, PushedFile
from .push import push_patched

__all__ = ["Push", "PushedFile", "push_patched"]
