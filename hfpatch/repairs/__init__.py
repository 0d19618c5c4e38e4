"""Repairs: fit a patched model to the original's activations, branch by branch, without labels."""
