"""Tests of the HTTP side over a fake decoder."""
