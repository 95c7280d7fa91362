"""Training: data, recipes, callbacks and the entry that puts them together."""
