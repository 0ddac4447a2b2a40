"""Tests of serving/engine."""
