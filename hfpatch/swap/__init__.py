"""Planners: from a scheme and the places found in a model to a list of changes."""
