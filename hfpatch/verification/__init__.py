"""`verify`: a patched model compared with its original on given batches."""
