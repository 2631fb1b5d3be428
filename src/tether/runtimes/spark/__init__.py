"""Nodes as agents that Spark places, supervises and feeds."""
