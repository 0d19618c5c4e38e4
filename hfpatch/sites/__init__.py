"""What is where in a model: norms, branches, MLPs, position tables and attentions.

blocks.py runs one block with some outputs moved or held; anatomy.py finds with that where residual branches begin and
end, which norms read what, and pre or post; branches.py names those places in the model in hand; deepnorm_weights.py
finds the weights that DeepNorm scales.
"""
