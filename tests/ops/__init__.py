"""Tests of the operator side."""
