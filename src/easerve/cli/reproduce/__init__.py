"""``easerve reproduce``: the published experiments, simulated, beside what was published."""
