"""Latency models of the stages, in seconds."""
