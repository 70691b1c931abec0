"""How the next configuration is chosen: pure functions of a study's history and a seed."""
