"""Caffe's input files: solvers, nets, data and trained weights, as a task that every protocol and runtime can train."""

from __future__ import annotations

from tether.caffe.net import Net
from tether.caffe.task import CaffeTask

__all__ = ["CaffeTask", "Net"]
