"""A model as a graph of plain data, in execution order: cut into shards and pipeline stages without the model."""
