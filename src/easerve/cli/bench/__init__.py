"""``easerve bench``: measurements side by side, in one run, on engines that run."""
