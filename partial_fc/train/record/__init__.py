"""Records of a run by rank 0 besides its log, for people and programs."""
