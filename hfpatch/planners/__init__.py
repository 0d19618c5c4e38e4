"""Planners: turn a scheme and the sites found in a model into changes."""
