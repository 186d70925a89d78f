"""Data: rows of many clients, from files, named sets and the hub, and partitions that make clients of rows.

>>> from fedbayes import data
>>> clients = data.load("digits", partition="shards:2", clients=10)
>>> clients
Clients(digits: 10 clients, 1797 rows of (64,), 10 classes)
"""

from fedbayes.data.clients import Clients
from fedbayes.data.corruptions import corrupted
from fedbayes.data.describe import describe, label_counts
from fedbayes.data.sources import NAMES, load
from fedbayes.data.synthetic import synthetic

__all__ = ["NAMES", "Clients", "corrupted", "describe", "label_counts", "load", "synthetic"]
