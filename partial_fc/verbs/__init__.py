"""What users type besides training: `partial-fc VERB`, a module each."""
