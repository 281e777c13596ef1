"""`partial-fc doctor`: looks at training data and at hosts before a run finds out what is wrong with them."""
