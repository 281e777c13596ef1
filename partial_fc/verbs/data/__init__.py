"""`partial-fc data`: commands that write data sets."""
