"""Connections of a parallelized model to the tools that train models: Trainer, accelerate, peft, Lightning.

They read attributes of a model to see that it is tensor-parallel, and then neither wrap it in DDP nor give the ranks
of a group different batches. What they save and load is the whole model's: functions of theirs that would handle one
rank's shards are replaced, once each tool is imported, for parallelized models alone.
"""
