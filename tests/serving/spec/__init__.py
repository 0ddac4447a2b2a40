"""Tests of serving/spec."""
