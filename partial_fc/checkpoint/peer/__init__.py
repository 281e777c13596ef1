"""Copies of the state in the memory of other hosts: commits, how they travel, and going on from them."""
