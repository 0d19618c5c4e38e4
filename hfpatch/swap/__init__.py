"""From a scheme and the sites of a model to what changes."""
