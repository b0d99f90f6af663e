"""Explorer: one HTML page on which a graph, recorded attention or moving clusters are looked at.

:func:`graphattn.explore` writes the page. `packing.py` makes arrays short, `graph_data.py`,
`attention_data.py` and `flow_data.py` collect what a part of the page shows, and `explorer.js`
draws it in the browser.
"""
