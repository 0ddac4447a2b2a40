"""The mathematics of a speculation round: drafts, sampling, verification, gamma."""
