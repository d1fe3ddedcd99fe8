"""The executor of schedules: runs a list of ops, and knows neither a layer nor a model."""
