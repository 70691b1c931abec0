"""The pure control core: no clock, no I/O, no randomness. Time is integer nanoseconds."""
