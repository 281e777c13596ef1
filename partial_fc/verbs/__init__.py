"""Commands besides training: `partial-fc VERB`, a module each."""
