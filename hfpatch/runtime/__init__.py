"""The modules, lenses and edits that a patched model runs; remote code ships these files as they are."""
