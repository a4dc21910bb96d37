"""Texts that have a name, and that replicas keep at hand."""
