"""`partial-fc torture`: a training that is disturbed on purpose, and whether its losses can tell."""
