"""`partial-fc checkpoint`: what one does with checkpoints beside training."""
