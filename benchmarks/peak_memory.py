"""The memory that a process takes."""

from pathlib import Path

import torch

from partial_fc.machine import status_bytes

_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """The peak memory of this process (cuda: its tensors on the GPU) from here on, beyond the current."""

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._idle = torch.cuda.memory_allocated(device)
        else:
            _CLEAR_REFS.write_text("5")  # resets the peak resident size (man 5 proc)
            self._idle = status_bytes("VmRSS")
            self._idle_file = status_bytes("RssFile")

    def added_bytes(self) -> int:
        """Returns the peak minus the start. Pages of mapped files count while they are resident."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._idle
        return status_bytes("VmHWM") - self._idle

    def mapped_file_bytes(self) -> int:
        """Returns the resident bytes of mapped files beyond the start, which the kernel can reclaim."""
        return 0 if self._device.type == "cuda" else status_bytes("RssFile") - self._idle_file
