"""Rows of the head: where they lie and in which dtype (table, storage, staging), how they move (optimizers,
catch_up)."""

from partial_fc.head.rows.optimizers import RowAdagrad, RowAdamW, RowOptimizer, RowSGD
from partial_fc.head.rows.storage import Storage
from partial_fc.head.rows.table import RowTable
