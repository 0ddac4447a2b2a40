"""The learner: traces in, a proven better drafter out."""
