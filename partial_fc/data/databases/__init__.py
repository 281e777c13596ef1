"""Image databases of Caffe and Caffe2 (LMDB, LevelDB) as sources, read without conversion."""

from partial_fc.data.databases.source import DatabaseSource, open_database
