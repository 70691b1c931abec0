"""What makes the files of this repository, and measures."""
