"""Runs models and measures them: small twins, inputs, quiet forwards, outputs compared, repeated blocks."""
