"""Starting ranks: torchrun's agents, what a rank runs, and which ranks are still there."""
