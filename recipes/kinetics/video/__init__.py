"""Video clips for training and testing: GluonCV's lists, choice of frames and augmentations."""

from .clip_list import ClipList
from .transforms import ClipTransform, Window
