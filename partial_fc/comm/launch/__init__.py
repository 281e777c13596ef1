"""How this process was started, and how our own --nodes and --gpus start others."""
