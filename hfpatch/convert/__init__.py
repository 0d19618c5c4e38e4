"""Conversions that keep the function, or fit what can't be kept."""
