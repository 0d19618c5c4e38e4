"""What is where in a model: norms, branches, MLPs, position tables and attentions."""
