"""The prompt sets that ship with Redraft: one YAML file a domain and split.

A file `DOMAIN.SPLIT.yaml` holds slots, templates and written prompts; ops/prompt_sets.py validates and expands it.
Splits (train, held_out, demo) share neither a template nor a prompt. All text is original.
"""
