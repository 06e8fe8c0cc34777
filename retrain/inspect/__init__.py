"""The token-credit viewer: what every token of a step was given and why, in a terminal or in the report."""
