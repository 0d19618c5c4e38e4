"""Fitting a patched model back to the original, branch by branch, without labels."""
