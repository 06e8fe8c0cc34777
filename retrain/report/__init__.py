"""Write one page about a run or a campaign: what it learned, how conditions compare, what it cost,
and what the model wrote.

`data` reads the folder, `figures` draws the data, and `page` puts both into the HTML of
`templates/`.
"""
