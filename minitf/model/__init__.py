"""The mathematics of the transformer, and nothing else."""
