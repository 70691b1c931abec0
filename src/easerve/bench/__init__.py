"""Load on a server from outside, and what came of it: the client, its CPU, the report."""
