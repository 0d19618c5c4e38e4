"""The schemes a user can ask for, by kind: norms, positions, MLPs, placements."""
