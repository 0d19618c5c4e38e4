"""Measurements on models: small models, example inputs, forwards without side effects, comparison of outputs."""
