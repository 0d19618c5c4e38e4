"""Finds norms, branches, MLPs, position tables and attentions in a model.

block_runs.py runs one block with some outputs moved or held. With that stream.py finds who writes to the residual
stream and who reads a norm, and residual_branches.py where residual branches begin and end. branch_sites.py names those
places in the model in hand; deepnorm_weights.py finds the weights that DeepNorm scales.
"""
