"""Nodes as processes: the driver's side, the node's side, and the links between them."""
