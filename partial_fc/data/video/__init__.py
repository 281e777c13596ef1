"""Video clips for training and testing: GluonCV's lists, choice of frames and augmentations."""

from partial_fc.data.video.clip_list import ClipList
from partial_fc.data.video.transforms import ClipTransform, Window
