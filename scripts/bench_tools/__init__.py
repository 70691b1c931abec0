"""EAServe's bench, vLLM's and aiperf against a server whose times are known."""
