"""Magics, and how they stream into a cell."""
