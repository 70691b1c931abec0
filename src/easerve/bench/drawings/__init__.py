"""What a report is made of: its parts, and results of a bench drawn with them."""
