"""Any model, unedited: its structure is found from its graph, its layers cut at their all-reduces."""
