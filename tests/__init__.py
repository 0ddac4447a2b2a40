"""The laws and the parts, tested package by package."""
