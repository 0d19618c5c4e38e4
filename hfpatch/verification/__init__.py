"""Compares a patched model with its original: modules, outputs by dtype, and the stream layer by layer."""
