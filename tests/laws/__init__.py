"""The laws of the design, each over every drafter kind."""
