"""Rarely needed features: planners that schemes name by entry point, and functions of their own."""
