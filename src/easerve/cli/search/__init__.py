"""The commands around the search for a deployment."""
