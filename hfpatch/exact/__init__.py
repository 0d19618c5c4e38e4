"""LayerNorm to RMSNorm without changing the function: search, folding, check."""
