"""How ``models/tiny-llava`` was made, and how often it is right."""
