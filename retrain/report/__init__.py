"""One page for a run or a campaign: what was learned, how it compares, what it cost, and what the model wrote.

`data` reads the folder, `figures` draw from the data, `page` puts both into the HTML of `templates/`, `serve` keeps it fresh.
"""
