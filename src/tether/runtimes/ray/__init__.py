"""Nodes as agents that are actors of Ray, which places and replaces them."""
