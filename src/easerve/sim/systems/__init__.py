"""Whole systems over the same modelled engines: ours, and those that it is compared with."""
