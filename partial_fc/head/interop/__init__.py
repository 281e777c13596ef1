"""Adapters to PyTorch's interfaces: nn.Module, Optimizer, distributed checkpoints, torch.compile."""
