"""The CPU kernel's C++ sources and how they are built; ../cpu.py calls them."""
