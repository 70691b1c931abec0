"""How the two engines of a device keep to a demand: the cell, its two sides, the drivers."""
