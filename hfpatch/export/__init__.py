"""Checkpoints that open without hfpatch."""
