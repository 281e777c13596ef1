"""Image databases of Caffe and Caffe2 (LMDB, LevelDB) as sources, read without conversion."""

from .source import DatabaseSource, open_database
