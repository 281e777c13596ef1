"""Checkpoints that any number of ranks can load.

models_root/checkpoints/step-00001000/
    manifest.json                    step, position in the data, class ranges, scores, configuration, versions
    backbone.safetensors             parameters; running statistics of all ranks together
    optimizer.safetensors            the backbone optimizer's state by parameter name; NAME/raw and NAME/ema: weights
                                     that --ema or --lora train and do not deliver (train/backbone.py)
    class-names.txt                  one a line, by class number, where classes have names
    head-00000-of-00002-classes-<start>-<stop>.safetensors
                                     created rows of classes [start, stop): centres, and one tensor per row state;
                                     each rank has as many of these as its rows need
    head-00000-of-00002-hard-negatives.safetensors
                                     that rank's lists, if there are any
    head-NAME-00000-of-00002-...     the same of a table with a name, of a head with several
    rank-00000-of-00002.safetensors  what only that rank has: its running statistics
    rank-00000-of-00002.sha256       the checksums of what that rank wrote: `sha256sum -c rank-*.sha256`
    COMPLETE                         written last; a folder without it does not count

A rank's share is copied (snapshot.py), written in the background (saver.py) and read again (folders.py, consistency.py,
read.py). One rank of each folder writes what is equal on all ranks, so that every host has it even if hosts do not
share a folder. rows.py describes rows, their files and their reader; head_state.py the rest of the head.
verbs/checkpoint is `partial-fc checkpoint`.
"""

from typing import TYPE_CHECKING

from partial_fc.checkpoint.files import save_tensors, write_json
from partial_fc.checkpoint.folders import best, complete, newest
from partial_fc.on_demand import on_demand

if TYPE_CHECKING:
    from partial_fc.checkpoint.read import Checkpoint
    from partial_fc.checkpoint.saver import Saver
    from partial_fc.checkpoint.snapshot import Snapshot, capture, copied

__getattr__ = on_demand(
    __name__, {"Checkpoint": "read", "Saver": "saver", **dict.fromkeys(("Snapshot", "capture", "copied"), "snapshot")}
)
