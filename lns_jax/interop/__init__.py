"""The doors to other formats."""
