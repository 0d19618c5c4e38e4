"""Adapters and pages that stand on the library: the report page, TransformerLens. Nothing else imports them."""
