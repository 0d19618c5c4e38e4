"""Finds norms, branches, MLPs, position tables and attentions in a model.

blocks.py runs one block with some outputs moved or held; with that stream.py finds who writes to the residual stream
and who reads a norm, and anatomy.py where residual branches begin and end, which norms read what, and pre or post;
branches.py names those places in the model in hand; deepnorm_weights.py finds the weights that DeepNorm scales.
"""
