"""Patched classes, the patch record in config.json, fingerprints: saving and opening."""
