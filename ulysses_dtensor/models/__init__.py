"""One file for each world of models: how to find its attentions and its sequence region."""
