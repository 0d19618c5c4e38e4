"""Base of the package: registries, scheme options, globs, plan rows, the undoable transaction."""
