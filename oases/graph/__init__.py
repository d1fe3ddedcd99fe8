"""Layer graphs of models as plain data, divided into shards and pipeline stages without the model."""
