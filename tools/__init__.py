"""Commands around the trainer: bench and plan, torture, demo data. Installed as partial_fc.tools."""
