"""Synthetic work: what clients ask. Randomness is an argument."""
