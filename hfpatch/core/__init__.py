"""What the rest of hfpatch stands on: registries, scheme options, globs, the undoable transaction."""
