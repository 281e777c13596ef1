"""`partial-fc checkpoint`: commands on checkpoints."""
