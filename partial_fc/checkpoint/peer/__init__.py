"""In-memory replicas of the state on other hosts: their transfer (commits.py), and recovery from them (restore.py)."""

from partial_fc.checkpoint.peer.commits import PeerCopies, ProcessState
from partial_fc.checkpoint.peer.restore import PeerCheckpoint, recover
