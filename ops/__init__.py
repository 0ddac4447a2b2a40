"""What people run: the command line, the local stack, the demo and its prompts."""
