"""Drafters, one module a kind, behind one protocol."""
