"""Plans and model shapes: the data that the planner writes and training executes."""
