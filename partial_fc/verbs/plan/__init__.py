"""`partial-fc plan`: time, memory and traffic of the head, predicted."""
