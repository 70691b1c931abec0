"""HAS: find the deployment. Imports neither serve nor cluster: what is tried is injected."""
