"""Rarely needed features: planners that schemes name, as those of other packages are, and functions of their own."""
