"""Requests of models that share go to the replica that answers first, instead of in turn."""
