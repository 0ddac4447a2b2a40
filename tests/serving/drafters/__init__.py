"""Tests of serving/drafters."""
