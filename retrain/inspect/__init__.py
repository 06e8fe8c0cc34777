"""The token-credit viewer: the advantage of every token of a step and where it comes from, in a terminal or in the report."""
