"""Mutations: faults of oases/ and csrc/ that the tests must notice."""

from mutation_list.choices import CHOICES
from mutation_list.compiled import COMPILED
from mutation_list.execution import EXECUTION
from mutation_list.mutation import Mutation
from mutation_list.training import TRAINING

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS = (*EXECUTION, *CHOICES, *TRAINING, *COMPILED)
