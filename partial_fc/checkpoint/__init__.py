"""Checkpoints that any number of ranks can load.

models_root/checkpoints/step-00001000/
    backbone.safetensors             parameters and buffers; rank 0
    optimizer.safetensors            the backbone optimiser's state by parameter name; rank 0
    head-00000-of-00002-classes-<start>-<stop>.safetensors
                                     made rows of classes [start, stop): centres, and one tensor per row state;
                                     each rank has as many of these as its rows need
    head-00000-of-00002-hard-negatives.safetensors
                                     that rank's lists, if there are any
    manifest.json                    step, position in the data, class ranges, best scores, configuration, versions
    COMPLETE                         written last; a folder without it does not count
"""

from partial_fc.checkpoint.files import write_json
from partial_fc.checkpoint.read import Checkpoint, newest
from partial_fc.checkpoint.write import save, save_model

__all__ = ["Checkpoint", "newest", "save", "save_model", "write_json"]
