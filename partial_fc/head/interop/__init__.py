"""The head behind the interfaces of PyTorch: module, optimizer, distributed checkpoints."""
