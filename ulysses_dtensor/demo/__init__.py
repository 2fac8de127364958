"""The demo: a byte-level decoder trained on real text, sequence-parallel and on one rank, side by side."""
