"""What two processes agree on: messages and their checks, no behaviour."""
