"""The replica: OpenAI-compatible HTTP, the engine, the drafters and the hot swap."""
