"""What is sent: the manifest of a round, where each uploaded array comes from, and the bytes themselves.

Nothing here knows an engine. The manifest is read off shapes alone, provenance off the program (its jaxpr), so both hold for
every run of the algorithm and not for one that was watched.
"""

from fedbayes.wire.messages import Leaf, adapt_reads_labels, check, manifest, sources, text
from fedbayes.wire.packing import PIECE, assemble, cut, join, metadata, pack, unpack

__all__ = [
    "PIECE", "Leaf", "adapt_reads_labels", "assemble", "check", "cut", "join", "manifest", "metadata", "pack", "sources",
    "text", "unpack",
]  # fmt: skip
