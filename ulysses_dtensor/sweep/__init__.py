"""Every causal-LM family of Transformers, tiny and with random weights, on one device and on simulated ranks."""
