"""Mutations: faults of oases/ and csrc/ that the tests must notice."""

from reliability.mutation_list.choices import CHOICES
from reliability.mutation_list.compiled import COMPILED
from reliability.mutation_list.execution import EXECUTION
from reliability.mutation_list.mutation import Mutation
from reliability.mutation_list.training import TRAINING

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS = (*EXECUTION, *CHOICES, *TRAINING, *COMPILED)
