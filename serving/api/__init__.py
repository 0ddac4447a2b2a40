"""OpenAI-compatible HTTP in front of an engine."""
