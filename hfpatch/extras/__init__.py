"""Adapters and pages that stand on the library: the report page, TransformerLens. Only cli/ imports them."""
