"""What serving and learner agree on; imports neither of them."""
