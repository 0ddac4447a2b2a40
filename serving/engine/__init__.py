"""Requests in, committed tokens out: schedule, draft, forward, verify, commit."""
