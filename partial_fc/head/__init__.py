"""The margin softmax over class centres that are sharded over the ranks. docs/head.md has the mathematics and
the order of the collectives.

Letters: B local batch, G global batch (the sum of B over ranks), D feature width, C all classes, L local classes,
S sampled local classes.
"""

from partial_fc.head.cross_entropy import CrossEntropy
from partial_fc.head.heads import Heads
from partial_fc.head.interop.optimizer import HeadOptimizer, JointOptimizer
from partial_fc.head.margin import ArcFace, CombinedMargin, CosFace, Margin, Softmax
from partial_fc.head.margin_adaptive import AdaFace
from partial_fc.head.margin_curricular import CurricularFace
from partial_fc.head.options import Compute, LossOptions, Sampling
from partial_fc.head.partial_fc import PartialFC
from partial_fc.head.protocol import Head, Table, check_head
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD, Storage
from partial_fc.head.rule import MLC, MLCD, MeanSoftmax, OwnOut, Rule, SoftTarget
from partial_fc.head.selection.hard_negatives import HardNegatives
from partial_fc.head.selection.labels import draw_labels
from partial_fc.head.shard import Shard

__all__ = [
    "MLC",
    "MLCD",
    "AdaFace",
    "ArcFace",
    "CombinedMargin",
    "Compute",
    "CosFace",
    "CrossEntropy",
    "CurricularFace",
    "HardNegatives",
    "Head",
    "HeadOptimizer",
    "Heads",
    "JointOptimizer",
    "LossOptions",
    "Margin",
    "MeanSoftmax",
    "OwnOut",
    "PartialFC",
    "RowAdagrad",
    "RowAdamW",
    "RowSGD",
    "Rule",
    "Sampling",
    "Shard",
    "SoftTarget",
    "Softmax",
    "Storage",
    "Table",
    "check_head",
    "draw_labels",
]
