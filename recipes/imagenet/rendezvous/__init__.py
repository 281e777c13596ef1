"""The rendezvous of hosts of Caffe2's trainer, --num-shards: through a Redis server or a folder."""
