"""What keeps those away who do not belong to a run (SECURITY.md): the kernel by their address (admission.py), rank 0 by
what they say (hello.py, gate.py)."""
