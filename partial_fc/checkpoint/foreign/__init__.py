"""Class centres that other trainers wrote."""
