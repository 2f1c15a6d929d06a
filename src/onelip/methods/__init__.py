"""One file per method of the literature; `_registry` is the table of all of them."""
