"""Video clips for training and testing: GluonCV's lists, its choice of frames, its augmentations."""

from partial_fc.data.video.clip_list import ClipList
from partial_fc.data.video.transforms import ClipTransform, Window

__all__ = ["ClipList", "ClipTransform", "Window"]
